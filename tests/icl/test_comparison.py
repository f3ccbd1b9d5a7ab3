"""Trained models beside the end of the flow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from esscher.icl import OVKQ, LinearTask, risk
from esscher.icl.specs import TrainSpec
from esscher.icl.stability import flow_end, judged
from esscher.runs import execute

SMALL = {
    "dim": 2,
    "covariances": ("kms:0.3",),
    "lengths": (4, 8),
    "seeds": 2,
    "steps": 60,
    "rate": 0.02,
}
SPEC = TrainSpec(**SMALL, records=4, evaluation=64, final_evaluation=20_000)


def test_trained_models_beside_the_flow(tmp_path: Path):
    """Sampled errors within 4.5 standard errors of the exact ones (8 of them, false alarms 5e-5),
    all above the flow's.
    """
    rows = execute(SPEC, tmp_path / "run").table("final").to_dict("records")
    assert len(rows) == 8
    task = SPEC.task("kms:0.3")
    for row in rows:
        weights = OVKQ(*(np.reshape(row[name], (3, 3)) for name in "OVKQ"))
        exact = 2 * float(risk(task, weights, row["length"], row["model"]))
        assert abs(row["mse"] - exact) < 4.5 * row["stderr"]
        assert exact > flow_end(task, row["length"], row["model"])
        assert row["status"] in ("undertrained", "stuck")


def test_models_that_did_not_arrive_are_stuck_or_still_on_their_way(
    monkeypatch: pytest.MonkeyPatch,
):
    """Errors that have hardly begun, level off above the flow, still fall, arrived, diverged; noise
    alone is no fall.
    """
    steps, generator = np.arange(0, 1000, 10), np.random.default_rng(0)
    courses = {
        "begun": 4.0 - 1e-3 * steps + 0.1 * generator.standard_normal(steps.size),
        "stuck": 1.5 + 3 * np.exp(-steps / 50) + 0.01 * generator.standard_normal(steps.size),
        "undertrained": 1.0 + 3 * np.exp(-steps / 500),
        "ok": 1.02 + 3 * np.exp(-steps / 50),
        "diverged": np.full(steps.size, np.nan),
    }
    monkeypatch.setattr("esscher.icl.stability.flow_end", lambda task, length, kind: 1.0)
    final, curve = [], []
    for name, errors in courses.items():
        key = {"length": 10, "model": name}
        last = {"mse": errors[-1], "stderr": 0.01, "advice": ""}
        final.append(key | last | {"status": name if name == "diverged" else "ok"})
        curve += [
            key | {"step": step, "mse": mse, "stderr": 0.01}
            for step, mse in zip(steps, errors, strict=True)
        ]
    found = judged(LinearTask.isotropic(2), pd.DataFrame(final), pd.DataFrame(curve))
    assert found["status"].tolist() == ["undertrained", *list(courses)[1:]]
    assert "above the end of its flow; take another seed" in found["advice"][1]
    assert "train for more steps" in found["advice"][2]
