"""Trained models beside the end of the flow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from esscher.icl.specs import TrainSpec
from esscher.icl.stability import flow_ends, judged, trained_risks
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
    final = execute(SPEC, tmp_path / "run").table("final")
    ends = flow_ends(SPEC, final)
    assert len(ends) == 4
    trained = trained_risks(SPEC, final, ends)
    assert (np.abs(trained["sampled"] - trained["exact"]) < 4.5 * trained["stderr"]).all()
    assert (trained["excess"] > 0).all()
    np.testing.assert_allclose(trained["flow"] * (1 + trained["excess"]), trained["exact"])
    lost = trained_risks(SPEC, final.assign(status="diverged"), ends)
    assert lost["exact"].isna().all()


def test_models_that_did_not_arrive_are_stuck_or_still_on_their_way():
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
    final, curve = [], []
    for seed, (status, errors) in enumerate(courses.items()):
        key = {"covariance": "isotropic", "length": 10, "seed": seed, "model": "softmax"}
        last = {"mse": errors[-1], "stderr": 0.01, "advice": ""}
        final.append(key | last | {"status": status if status == "diverged" else "ok"})
        curve += [
            key | {"step": step, "mse": mse, "stderr": 0.01}
            for step, mse in zip(steps, errors, strict=True)
        ]
    flow = pd.DataFrame([{"covariance": "isotropic", "length": 10, "model": "softmax", "mse": 1.0}])
    found = judged(pd.DataFrame(final), pd.DataFrame(curve), flow)
    assert found["status"].tolist() == ["undertrained", *list(courses)[1:]]
    assert "above the end of its flow; take another seed" in found["advice"][1]
    assert "train for more steps" in found["advice"][2]
