"""Concentration as a run."""

from __future__ import annotations

from pathlib import Path

from esscher.icl.concentration.spec import ConcentrationSpec
from esscher.runs import execute


def test_concentration_run(tmp_path: Path):
    spec = ConcentrationSpec(
        dim=2, covariances=("isotropic",), lengths=(10, 100, 1000, 10_000), repeats=8, prompts=128
    )
    run = execute(spec, tmp_path / "run")
    rates = run.table("rates").set_index(["metric", "against"])
    assert 0.4 < rates.loc[("output", "linear"), "exponent"] < 0.6
    assert 0.8 < rates.loc[("risk_gradient", "limit"), "exponent"] < 1.1
    assert (rates["low"] <= rates["high"]).all()
    assert set(run.tables) == {"errors", "exact", "curves", "rates", "risks", "bounds"}
    risks = run.table("risks")
    assert (risks["measured"] < risks["mended"]).all()
    assert set(risks["quantity"]) == {"risk", "gradient"}
