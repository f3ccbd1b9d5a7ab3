"""The flow as a run."""

from __future__ import annotations

from pathlib import Path

from esscher.icl.flow.spec import FlowSpec
from esscher.runs import execute


def test_flow_run_orders_the_models(tmp_path: Path):
    run = execute(
        FlowSpec(dim=2, covariances=("isotropic",), lengths=(10, 200), draws=500), tmp_path / "run"
    )
    table = run.table("final").pivot_table(index="length", columns="model", values="mse")
    assert (table["bayes"] < table["linear"]).all()
    assert (table["linear"] < table["softmax"]).all()
    assert (table.loc[200] < table.loc[10]).all()
