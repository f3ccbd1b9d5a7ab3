"""Figures of a stored run: on given axes, as files of a paper column's size, with messages where
they cannot be.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from esscher.report.figures import COLUMN, STYLE, WIDE, save_figure, save_figures
from esscher.runs import Run, load_run
from tests.report.atlas import ProbeLike, atlas_run, sparse_run, store_run

matplotlib.use("agg")


def axes() -> Axes:
    return Figure().subplots()


def test_map_shows_the_stored_numbers(atlas: Run) -> None:
    ax = axes()
    assert atlas.plot_map("coupling", ax=ax) is ax
    (image,) = ax.get_images()
    heads = atlas.table("heads").sort_values(["layer", "head"])
    assert np.array_equal(
        np.asarray(image.get_array()), heads["coupling"].to_numpy().reshape(6, 12)
    )


def test_new_axes_when_none_are_given(atlas: Run) -> None:
    ax = atlas.plot_map()
    assert isinstance(ax, Axes)
    plt.close("all")


def test_wrong_columns_are_named(atlas: Run) -> None:
    for name in ("size", "regime"):
        with pytest.raises(ValueError, match=f"column: expected one of layer, .*got '{name}'"):
            atlas.plot_map(name, ax=axes())


def test_a_run_without_heads_says_so(tmp_path: Path) -> None:
    run = store_run(tmp_path / "run", ProbeLike(), {})
    with pytest.raises(ValueError, match="expected a run with heads"):
        run.plot_map(ax=axes())


def test_failed_heads_are_left_out(tmp_path: Path) -> None:
    atlas_run(tmp_path / "half", 2, 4, failed=0.5, seed=1).plot_map(ax=axes())
    everything = atlas_run(tmp_path / "all", 2, 2, failed=1.0)
    files = save_figures(everything, ["svg"], tmp_path / "figures")
    assert {file.stem for file in files} <= {"exponent_of_l2_against_the_horizon"}


def test_files_of_every_format(tmp_path: Path) -> None:
    folder = tmp_path / "figures"
    files = save_figures(sparse_run(tmp_path / "run"), ["svg", "pdf", "png"], folder)
    assert sorted(folder.iterdir()) == sorted(files)
    names = {"map_tokens_needed_10pct"}
    assert {file.stem for file in files} == names
    assert len(files) == 3 * len(names)
    for file in files:
        if file.suffix == ".png":
            with Image.open(file) as picture:
                assert picture.width / 200 == COLUMN
        elif file.suffix == ".svg":
            assert "<text" in file.read_text("utf-8")  # words stay words, drawn without LaTeX
        else:
            assert file.read_bytes().startswith(b"%PDF")


def test_all_figures_of_a_probe(tmp_path: Path) -> None:
    files = save_figures(atlas_run(tmp_path / "run", 2, 3), ["png"], tmp_path / "figures")
    wanted = {
        "map_tokens_needed_10pct",
        "map_beta_fit",
        "exponent_of_l2_against_the_horizon",
    }
    assert wanted <= {file.stem for file in files}
    with Image.open(tmp_path / "figures" / "exponent_of_l2_against_the_horizon.png") as picture:
        assert picture.width / 200 == WIDE


def test_same_figure_same_bytes(atlas: Run, tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        with matplotlib.rc_context(STYLE):
            figure = Figure()
            load_run(atlas.path).plot_map(ax=figure.subplots())
            save_figure(figure, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
