"""``esscher fit`` fits the stored curves of a run again, over every n or over those asked for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import esscher as es
from esscher.probe.curves import stored_curves
from esscher.probe.spec import ProbeSpec, fit_points, fit_range
from tests.cli.commands import run
from tests.snapshot.runs import RUNS


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A probe with moments and a sweep, as the snapshot has them; their numbers are compared with
    the kept ones there.
    """
    made = {name: tmp_path_factory.mktemp("fit") / name for name in ("moments", "converge")}
    for name, folder in made.items():
        RUNS[name](folder)
    return made


def fitted(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> list[dict[str, Any]]:
    return json.loads(run(["fit", str(folder), "--json", *options], capsys)[1])  # type: ignore[no-any-return]


def test_the_line_through_the_stored_curve_is_the_probes_own(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """From the stored curve alone, the exponent of l2 is the run's; with a window it is another."""
    stored = es.load_run(folders["moments"])
    (head,) = stored.table("heads").to_dict("records")
    points = fit_points(fit_range(ProbeSpec.read(stored.spec), int(head["n_keys"])))
    curves = stored.table("curves")
    part = stored_curves(curves[curves["n"].isin(points)], "l2")[head["layer"], head["head"]]
    again = es.fit_rate(part)
    assert again.exponent == pytest.approx(head["beta_fit"], rel=1e-12)
    assert "local slopes" in again.status.text
    (window,) = (
        row
        for row in fitted(capsys, folders["moments"], "--window", "16:70")
        if row["metric"] == "l2"
    )
    assert window["head"] == f"{head['layer']}.{head['head']}"
    assert (window["n_min"], window["n_max"]) == (16, 64)
    assert abs(window["exponent"] - again.exponent) > 1e-6


def test_every_stored_curve_of_a_probe_is_fitted(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The l2 error of heads, the moments of heads and of layers with their heads side by side."""
    curves = es.load_run(folders["moments"]).table("curves")
    expected = {}
    for metric in ("l2", "mean", "cov"):
        for (layer, head), curve in stored_curves(curves, metric).items():
            name = f"{layer}, all" if head == -1 else f"{layer}.{head}"
            expected[name, metric] = es.fit_rate(curve, raise_on_failure=False).exponent
    found = {(row["head"], row["metric"]): row for row in fitted(capsys, folders["moments"])}
    assert set(found) == set(expected)
    assert {metric for name, metric in found if name.endswith("all")} == {"mean", "cov"}
    for key, exponent in expected.items():
        assert found[key]["exponent"] == pytest.approx(exponent, rel=1e-12), key


def test_fit_of_a_sweep_is_the_sweeps_own(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = fitted(capsys, folders["converge"])
    rates = es.load_run(folders["converge"]).table("rates").to_dict("records")
    assert len(found) == len(rates) == 8
    stored = {(row["value"], row["metric"]): row for row in rates}
    for row in found:
        own = stored[row["value"], row["metric"]]
        assert row["status"] == own["status"]
        for key in ("exponent", "low", "high"):
            assert math.isclose(row[key], own[key], rel_tol=1e-12), (row, own)


def test_a_window_takes_every_n_inside() -> None:
    n = np.sort([300, 600, *2 ** np.arange(4, 16)])
    rms = n**-0.5 * (1 + 20 / n)
    curves = pd.DataFrame({"layer": 0, "head": 1, "metric": "l2", "kind": "exact", "n": n})
    curves = curves.assign(rms=rms, relative=rms, stderr=0.0, q95=rms, local_slope=np.nan)
    curve = stored_curves(curves, "l2")[0, 1]
    found = es.fit_rate(curve, window=(200.0, 700.0))
    assert (found.window.n_min, found.window.n_max) == (256, 600)
    inside = np.array([256.0, 300.0, 512.0, 600.0])
    slope = np.polyfit(np.log(inside), np.log(inside**-0.5 * (1 + 20 / inside)), 1)[0]
    assert found.exponent == pytest.approx(-slope, rel=1e-12)
