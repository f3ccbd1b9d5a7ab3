"""The lab's runs: paired training, flow and concentration in the store; figures chosen by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

from esscher.icl.comparison import compare_with_flow, flow_ends, trained_risks
from esscher.icl.concentration.job import ConcentrationSpec
from esscher.icl.figures import FIGURES, choose_figures, specs_for
from esscher.icl.flow.job import FlowSpec
from esscher.icl.tasks import as_task
from esscher.icl.training.job import TrainSpec, units
from esscher.runs import execute, resume

SMALL = {"dim": 2, "covariances": ("kms:0.3",), "lengths": (8, 4), "seeds": 2, "steps": 60, "rate": 0.02}
SPEC = TrainSpec(**SMALL, records=4, evaluation=64, final_evaluation=20_000)


def test_paper_settings_are_the_defaults():
    spec = TrainSpec()
    assert (spec.dim, spec.noise, spec.steps, spec.batch, spec.rate) == (5, 0.1, 500_000, 128, 1e-3)
    assert [unit["length"] for unit in units(spec)] == sorted(unit["length"] for unit in units(spec))
    assert len(units(spec)) == 18


def test_a_training_run_is_resumed_to_the_same_tables(tmp_path: Path):
    run = execute(SPEC, tmp_path / "run")
    assert set(run.tables) == {"curve", "distance", "path", "final"}
    final = run.table("final")
    assert len(final) == 8
    before = {name: (tmp_path / "run" / f"{name}.parquet").read_bytes() for name in run.tables}
    (tmp_path / "run" / "shards" / "000002.parquet").unlink()
    resume(tmp_path / "run")
    for name, content in before.items():
        assert (tmp_path / "run" / f"{name}.parquet").read_bytes() == content
    first = run.table("path").query("step == 0").groupby("seed")["values"]
    assert all(len({tuple(row) for row in rows}) == 1 for _, rows in first)


def test_trained_models_beside_the_flow(tmp_path: Path):
    """Sampled errors within 4.5 standard errors of the exact ones (8 of them, false alarms 5e-5), all above the flow's."""
    run = execute(SPEC, tmp_path / "run")
    trained = trained_risks(run.table("final"), run.table("path"), 2, 0.1)
    assert (np.abs(trained["sampled"] - trained["exact"]) < 4.5 * trained["stderr"]).all()
    compared = compare_with_flow(trained, flow_ends(trained, 2, 0.1), stuck=9.0)
    assert len(compared) == 4
    assert (compared["excess"] > 0).all()
    assert (compared["high"] > compared["low"]).all()


def test_seeds_far_above_the_flow_are_counted_apart():
    key = {"covariance": "isotropic", "length": 10, "model": "linear"}
    errors = enumerate([1.01, 1.03, 1.2])
    trained = pd.DataFrame([key | {"seed": i, "exact": e, "sampled": e, "stderr": 0.01} for i, e in errors])
    found = compare_with_flow(trained, pd.DataFrame([key | {"mse": 1.0}])).iloc[0]
    assert (found["seeds"], found["stuck"]) == (2, 1)
    assert found["trained"] == pytest.approx(1.02)
    assert found["excess"] == pytest.approx(0.02)


def test_flow_run_orders_the_models(tmp_path: Path):
    run = execute(FlowSpec(dim=2, covariances=("isotropic",), lengths=(10, 200), draws=500), tmp_path / "run")
    table = run.table("final").pivot_table(index="length", columns="model", values="mse")
    assert (table["bayes"] < table["linear"]).all()
    assert (table["linear"] < table["softmax"]).all()
    assert (table.loc[200] < table.loc[10]).all()


def test_concentration_run(tmp_path: Path):
    spec = ConcentrationSpec(dim=2, covariances=("isotropic",), lengths=(10, 100, 1000, 10_000), repeats=8, prompts=128)
    run = execute(spec, tmp_path / "run")
    rates = run.table("rates").set_index(["metric", "against"])
    assert 0.4 < rates.loc[("output", "linear"), "exponent"] < 0.6
    assert 0.8 < rates.loc[("risk_gradient", "limit"), "exponent"] < 1.1
    assert (rates["low"] <= rates["high"]).all()
    assert set(run.tables) == {"errors", "exact", "curves", "rates", "bounds"}


def test_figures_by_name():
    assert [figure.name for figure in choose_figures(None)] == [f"fig{i}" for i in range(1, 9)]
    assert [figure.name for figure in choose_figures("fig2, 7,Figure3")] == ["fig2", "fig7", "fig3"]
    with pytest.raises(ValueError, match=r"figure: expected some of fig1, .*, got 'fig9'"):
        choose_figures("fig9")
    assert set(specs_for([FIGURES["fig1"]], quick=True)) == {"concentration"}
    paper = specs_for([FIGURES["fig6"]], quick=False)
    assert paper["train"] == TrainSpec(covariances=("kms:0.5",))
    assert set(paper) == {"train", "flow"}


@pytest.mark.parametrize("name", ["round", "kms:x", "kms:1,2", "diag:1", "isotropic:3", "kms:2"])
def test_unknown_covariances(name: str):
    with pytest.raises(ValueError, match=r"covariance|rho"):
        as_task(name, 3)


@pytest.mark.parametrize(
    "change", [{"lengths": (0,)}, {"lengths": ()}, {"steps": 0}, {"batch": 0}, {"rate": -1.0}, {"seeds": 0}, {"heads": 0}]
)
def test_bad_specs(change: dict[str, object]):
    with pytest.raises(ValidationError, match=next(iter(change))):
        TrainSpec(**change)
