"""``esscher fit`` gives the exponents that a run stored, and others where another window is asked
for.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import esscher as es
from esscher.cli.fit import _of_probe
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


def test_fit_of_a_probe_is_the_probes_own(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    stored = es.load_run(folders["moments"])
    expected = {}
    for row in stored.table("heads").to_dict("records"):
        head = f"{row['layer']}.{row['head']}"
        expected[head, "l2"] = [row[key] for key in ("beta_fit", "beta_low", "beta_high")]
        expected |= {(head, metric): of_moments(row, metric) for metric in ("mean", "cov")}
    for row in stored.table("layers").to_dict("records"):
        expected |= {
            (f"{row['layer']}, all", metric): of_moments(row, metric) for metric in ("mean", "cov")
        }
    found = {(row["head"], row["metric"]): row for row in fitted(capsys, folders["moments"])}
    assert set(found) == set(expected)
    for key, numbers in expected.items():
        known = [
            math.nan if found[key][part] is None else found[key][part]
            for part in ("exponent", "low", "high")
        ]
        assert known == pytest.approx(numbers, rel=1e-12, nan_ok=True), key


def of_moments(row: dict[Any, Any], metric: str) -> list[float]:
    return [row[f"beta_{metric}{end}"] for end in ("", "_low", "_high")]


def test_the_line_through_the_stored_curve_is_the_probes_own(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """From the stored curve alone, the exponent of l2 is the run's; with a window it is another."""
    stored = es.load_run(folders["moments"])
    (part,) = (part for _, curve, part, _, _ in _of_probe(stored) if curve.metric == "l2")
    again = es.fit_rate(part)
    assert again.exponent == pytest.approx(float(stored.table("heads")["beta_fit"][0]), rel=1e-12)
    assert "local slopes" in again.status.text
    (window,) = (
        row
        for row in fitted(capsys, folders["moments"], "--window", "16:70")
        if row["metric"] == "l2"
    )
    assert (window["n_min"], window["n_max"]) == (16, 64)
    assert abs(window["exponent"] - again.exponent) > 1e-6


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


@pytest.mark.parametrize(("fit", "inside"), [((64, 4096), range(2, 9)), ((16, 256), range(0, 5))])
def test_the_range_is_that_of_the_probe_whatever_the_pool(
    fit: tuple[int, int], inside: range
) -> None:
    """A bent curve of a pool of 300 keys: the n of the fit lie below and beyond it, and n between
    them are left out.
    """
    n = np.sort([300, 600, *2 ** np.arange(4, 16)])
    rms = n**-0.5 * (1 + 20 / n)
    curves = pd.DataFrame(
        {
            "layer": 0,
            "head": 1,
            "metric": "l2",
            "kind": "exact",
            "n": n,
            "rms": rms,
            "relative": rms,
        }
    )
    curves = curves.assign(stderr=0.0, q95=rms, local_slope=np.nan)
    tables = {"curves": curves, "heads": pd.DataFrame({"layer": [0], "head": [1], "n_keys": [300]})}
    stored = SimpleNamespace(
        table=tables.__getitem__, tables=list(tables), spec={"job": "probe", "fit": list(fit)}
    )
    ((_, curve, fitted_part, _, _),) = _of_probe(stored)  # type: ignore[arg-type]
    found = es.fit_rate(fitted_part)
    fitted = 2.0 ** (4 + np.array(inside))
    assert found.n.tolist() == fitted.tolist()
    assert found.exponent == pytest.approx(
        -np.polyfit(np.log(fitted), np.log(fitted**-0.5 * (1 + 20 / fitted)), 1)[0], rel=1e-12
    )
    asked = es.fit_rate(curve, window=(200.0, 700.0))
    assert asked.n.tolist() == [256, 300, 512, 600]
