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

import esscher as es
from esscher.report.figures import save_figures
from esscher.report.style import COLUMN, STYLE, WIDE, save_figure
from esscher.runs import Run, load_run
from tests.report.atlas import ProbeLike, atlas_run, sparse_run, store_run

matplotlib.use("agg")


def axes() -> Axes:
    return Figure().subplots()


def test_curve_shows_the_stored_numbers(atlas: Run) -> None:
    ax = axes()
    assert es.load_run(atlas.path).plot_curve(0, 2, ax=ax) is ax
    curves = atlas.table("curves")
    stored = curves[
        (curves["layer"] == 0) & (curves["head"] == 2) & (curves["metric"] == "l2")
    ].sort_values("n")
    exact = next(
        line for line in ax.get_lines() if line.get_label() == "exact, keys drawn with replacement"
    )
    assert np.array_equal(exact.get_xdata(), stored["n"])
    assert np.array_equal(exact.get_ydata(), stored["rms"])
    labels = ax.get_legend_handles_labels()[1]
    assert {
        "mean of the output",
        "covariance of the output",
        "delta method",
        "95 % of queries below",
    } <= set(labels)
    assert any("heuristic" in label for label in labels)


def test_map_shows_the_stored_numbers(atlas: Run) -> None:
    ax = axes()
    assert atlas.plot_map("coupling", ax=ax) is ax
    (image,) = ax.get_images()
    heads = atlas.table("heads").sort_values(["layer", "head"])
    assert np.array_equal(
        np.asarray(image.get_array()), heads["coupling"].to_numpy().reshape(6, 12)
    )


def test_map_of_regimes_has_a_legend(atlas: Run) -> None:
    ax = atlas.plot_map("regime", ax=axes())
    assert set(ax.get_legend_handles_labels()[1]) == set(atlas.table("heads")["regime"])


@pytest.mark.parametrize("against", ["horizon2", "coupling", "horizon"])
def test_rates_have_a_point_per_head(atlas: Run, against: str) -> None:
    ax = atlas.plot_rates(against, ax=axes())
    points = ax.containers[0].lines[0].get_xydata()
    heads = atlas.table("heads").sort_values(against)
    assert points == pytest.approx(heads[[against, "beta_fit"]].to_numpy(), rel=1e-4)


def test_new_axes_when_none_are_given(atlas: Run) -> None:
    ax = atlas.plot_map()
    assert isinstance(ax, Axes)
    plt.close("all")


def test_wrong_places_are_named(atlas: Run) -> None:
    with pytest.raises(
        ValueError, match="layers 0 to 5 and heads 0 to 11 of this run, got layer 6, head 0"
    ):
        atlas.plot_curve(6, 0, ax=axes())
    with pytest.raises(ValueError, match=r"column: expected one of layer, .*got 'size'"):
        atlas.plot_map("size", ax=axes())
    with pytest.raises(ValueError, match="expected horizon2, horizon or coupling, got 'n'"):
        atlas.plot_rates("n", ax=axes())


def test_a_run_without_heads_says_so(tmp_path: Path) -> None:
    run = store_run(tmp_path / "run", ProbeLike(), {})
    with pytest.raises(ValueError, match="expected a run with heads"):
        run.plot_map(ax=axes())


def test_failed_heads_can_be_drawn(tmp_path: Path) -> None:
    run = atlas_run(tmp_path / "half", 2, 4, failed=0.5, seed=1)
    heads = run.table("heads")
    failed = heads[heads["status"] == "failed"].iloc[0]
    ax = run.plot_curve(int(failed["layer"]), int(failed["head"]), ax=axes())
    assert [text.get_text() for text in ax.texts] == ["NaN in the keys"]
    run.plot_map(ax=axes())
    everything = atlas_run(tmp_path / "all", 2, 2, failed=1.0)
    assert save_figures(everything, ["svg"], tmp_path / "figures") == []


def test_files_of_every_format(tmp_path: Path) -> None:
    folder = tmp_path / "figures"
    files = save_figures(sparse_run(tmp_path / "run"), ["svg", "pdf", "png"], folder)
    assert sorted(folder.iterdir()) == sorted(files)
    names = {
        "map_tokens_needed_10pct",
        "curve_least_demanding_L0H0",
        "curve_most_demanding_L0H1",
    }
    assert {file.stem for file in files} == names
    assert len(files) == 3 * len(names)
    for file in files:
        if file.suffix == ".png":
            with Image.open(file) as picture:
                assert picture.width / 200 in (COLUMN, pytest.approx(0.7 * WIDE))
        elif file.suffix == ".svg":
            assert "<text" in file.read_text("utf-8")  # words stay words, drawn without LaTeX
        else:
            assert file.read_bytes().startswith(b"%PDF")


@pytest.mark.slow
def test_all_figures_of_a_probe(tmp_path: Path) -> None:
    names = {
        file.stem
        for file in save_figures(atlas_run(tmp_path / "run", 2, 3), ["svg"], tmp_path / "figures")
    }
    wanted = {
        "map_tokens_needed_10pct",
        "map_regime",
        "map_beta_fit",
        "exponents_coupling",
        "exponents_horizon2",
    }
    assert wanted <= names
    assert any(name.startswith("curve_most_demanding_L") for name in names)


def test_same_figure_same_bytes(atlas: Run, tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        with matplotlib.rc_context(STYLE):
            figure = Figure()
            load_run(atlas.path).plot_curve(0, 2, ax=figure.subplots())
            save_figure(figure, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
