"""How constants grow with the support: both forms found again, and a sweep from a file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import esscher as es
from esscher.errors.montecarlo.job import growth_table, of_support
from esscher.measures.fields import read_law
from esscher.theory.sharp import uniform_constant
from tests.cli.commands import run

SWEEP = """
job: converge
title: support
law: {law: ball, dim: 2}
head: {kind: identity}
sweep: {over: support, values: [0.5, 1, 1.5, 2]}
n: 20,40
repeats: 2
metrics: [mean, uniform]
"""


def constants(values: np.ndarray, noise: float) -> pd.DataFrame:
    R = np.linspace(1, 3, len(values))
    frame = pd.DataFrame(
        {
            "value": R,
            "constant": values,
            "stderr": noise * values,
            "bound": math.nan,
            "bound_any": math.nan,
        }
    )
    return frame.assign(metric="mean", rate="1/2")


def test_a_power_and_an_exponential_are_told_apart() -> None:
    """From log-normal noise of 5 %, seed fixed; the interval of 95 % holds the truth."""
    R, rng = np.linspace(1, 3, 9), np.random.default_rng(0)
    for form, truth, values in (
        ("power", 2.5, 3 * R**2.5),
        ("exponential", 1.7, 0.2 * np.exp(1.7 * R)),
    ):
        noisy = values * np.exp(0.05 * rng.standard_normal(9))
        (row,) = growth_table(constants(noisy, 0.05)).to_dict("records")
        name = "power" if form == "power" else "growth"
        assert row["form"] == form
        assert row[f"{name}_low"] < truth < row[f"{name}_high"]
        assert row[f"{name}_misfit"] < 0.1


def test_the_line_is_numpys_and_few_radii_tell_nothing() -> None:
    R = np.linspace(1, 3, 6)
    values = np.array([1.0, 1.3, 1.9, 2.0, 3.1, 3.3])
    (row,) = growth_table(constants(values, 0.0)).to_dict("records")
    (slope, _), cov = np.polyfit(R, np.log(values), 1, cov=True)
    assert row["growth"] == pytest.approx(slope)
    # t, 4 degrees
    assert (row["growth_high"] - row["growth"]) == pytest.approx(
        2.776445 * math.sqrt(cov[0, 0]), rel=1e-5
    )
    (few,) = growth_table(constants(values[:3], 0.0)).to_dict("records")
    assert few["form"] == ""
    assert math.isnan(few["power"])


def test_laws_of_a_support() -> None:
    assert of_support(read_law({"law": "sphere", "dim": 3}), 2.0).radius == 2.0
    cube = of_support(read_law({"law": "cube", "dim": 4}), 2.0)
    assert cube.half_width == pytest.approx(1.0)


def test_a_sweep_over_the_support(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "support.yaml", tmp_path / "run"
    file.write_text(SWEEP)
    code, text, _ = run(
        ["converge", str(file), "--out", str(out), "--figures", "", "--json"], capsys
    )
    assert code == 0
    stored = es.load_run(out)
    table, errors = stored.table("constants"), stored.table("errors")
    assert json.loads(text)["growth"][0]["metric"] == "mean"
    assert table.groupby(["metric", "rate"]).size().to_dict() == {
        ("mean", "1/2"): 4,
        ("mean", "proved"): 4,
        ("uniform", "1/2"): 4,
    }
    for row in table[table["metric"] == "uniform"].to_dict("records"):
        head = es.Head([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]])
        assert row["bound"] == pytest.approx(
            uniform_constant(head, es.Ball(2, row["value"]), row["value"])
        )
        assert row["constant"] < row["bound"] <= row["bound_any"]
        # an error is at most the diameter
        assert row["constant"] <= math.sqrt(40) * 2 * row["value"]
    for row in table.to_dict("records"):  # the largest n^b E|error|, from the stored errors
        own = errors[(errors["metric"] == row["metric"]) & (errors["point"] == row["point"])]
        mean = own["squared"].pow(0.5).groupby(own["n"]).mean()
        grown = mean * mean.index.to_numpy() ** row["exponent"]
        assert row["constant"] == pytest.approx(float(grown.max()))
        assert row["at"] == grown.idxmax()
    proved = table[table["rate"] == "proved"]
    assert (proved["exponent"] < 0.5).all()
    assert set(stored.table("growth")["of"]) == {"measured", "bound", "bound_any"}
    code, text, _ = run(["converge", str(file), "--out", str(out), "--figures", ""], capsys)
    assert code == 0
    assert "proved: any law" in text


def test_a_law_without_support_is_refused_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(SWEEP.replace("law: ball", "law: gaussian"))
    code, _, err = run(
        ["converge", str(file), "--out", str(tmp_path / "run"), "--figures", ""], capsys
    )
    assert code == 2
    assert "laws with a radius" in err
