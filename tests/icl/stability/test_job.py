"""Flows from many starts as a run, the test between the models, distances, and what training says
beside them.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import ValidationError
from scipy.stats import binom

from esscher.icl import default_weights
from esscher.icl.comparison import trained_risks
from esscher.icl.stability.agreement import beside_training, spec_beside
from esscher.icl.stability.distance import apart, balance
from esscher.icl.stability.flow import pack
from esscher.icl.stability.job import pair_flows, units
from esscher.icl.stability.spec import StabilitySpec
from esscher.icl.stability.verdict import ALL, holm, verdict
from esscher.icl.tasks import LinearTask
from esscher.icl.training.spec import TrainSpec
from esscher.icl.training.white import Weights, weights_of
from esscher.runs import execute, resume

SMALL = StabilitySpec(
    dim=2,
    covariances=("isotropic",),
    lengths=(10,),
    starts=3,
    block=2,
    training=60,
    until=90,
    times=12,
)


def test_a_run_is_resumed_to_the_same_tables(tmp_path: Path):
    run = execute(SMALL, tmp_path / "run")
    assert set(run.tables) == {"flows", "curve", "distance", "verdict"}
    flows, curve = run.table("flows"), run.table("curve")
    assert len(flows) == 3 * 2
    assert flows.groupby(["length", "seed"])["lead"].nunique().eq(1).all()
    fixed = curve[curve["model"] == "linear"].groupby(["length", "seed"])["balance"]
    assert (fixed.max() - fixed.min()).max() < 1e-3  # what the scale moves, linear attention keeps
    before = {name: (tmp_path / "run" / f"{name}.parquet").read_bytes() for name in run.tables}
    (tmp_path / "run" / "shards" / "000001.parquet").unlink()
    resume(tmp_path / "run")
    for name, content in before.items():
        assert (tmp_path / "run" / f"{name}.parquet").read_bytes() == content


def test_a_run_that_is_stopped_has_all_settings():
    spec = SMALL.model_copy(update={"lengths": (10, 40)})
    assert [(unit["first"], unit["length"]) for unit in units(spec)] == [
        (0, 10),
        (0, 40),
        (2, 10),
        (2, 40),
    ]
    with pytest.raises(
        ValidationError, match="until: expected a time of at least that of training"
    ):
        StabilitySpec(training=100, until=10)


def flows(stuck: dict[tuple[str, int], list[tuple[bool, bool]]]) -> pd.DataFrame:
    """A table of starts that are stuck (softmax, linear) in some settings; the lead is the number
    of the start.
    """
    rows = []
    for (covariance, length), starts in stuck.items():
        for seed, pair in enumerate(starts):
            for model, there in zip(("softmax", "linear"), pair, strict=True):
                row = {
                    "covariance": covariance,
                    "length": length,
                    "seed": seed,
                    "model": model,
                    "lead": float(seed),
                }
                rows.append(
                    row
                    | {"status": "stuck" if there else "ok", "arrival": math.nan if there else 10.0}
                )
    return pd.DataFrame(rows)


def test_verdict_counts_starts_that_tell_the_models_apart():
    one = [(True, True)] * 2 + [(False, True)] * 6 + [(False, False)] * 2
    two = [(False, False)] * 9 + [(True, False)]
    table = verdict(flows({("isotropic", 10): one, ("isotropic", 100): two}))
    first, second, total = table.to_dict("records")
    assert (first["only_linear"], first["only_softmax"]) == (6, 0)
    assert first["p"] == pytest.approx(2 * 2 * binom.cdf(0, 6, 0.5))  # two-sided, times Holm's 2
    assert (second["only_linear"], second["only_softmax"], second["p"]) == (0, 1, 1.0)
    assert (first["softmax"], first["linear"], first["linear_never"]) == (0.2, 0.8, 0.8)
    assert (total["covariance"], total["only_linear"], total["only_softmax"]) == (ALL, 6, 1)
    assert total["p"] == pytest.approx(2 * binom.cdf(1, 7, 0.5))
    assert total["linear"] == 0.4
    assert first["linear_lead"] == 1.0  # every stuck start has less of it
    assert second["softmax_lead"] == 0.0
    assert math.isnan(second["linear_lead"])


def test_correction():
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03]), [0.03, 0.06, 0.06])


def test_distance_modulo_scale():
    one = weights_of(default_weights(3, torch.Generator().manual_seed(0)))
    scaled = Weights(1.4 * one.o, 1.4 * one.V, one.K / 1.4, one.Q / 1.4)
    found = apart(scaled, one)
    assert found.plain == pytest.approx(np.sum((pack(scaled) - pack(one)) ** 2))
    assert found.modulo < 1e-20
    assert found.product < 1e-15
    two = weights_of(default_weights(3, torch.Generator().manual_seed(1)))
    grid = np.exp(np.linspace(-2, 2, 4001))
    tried = [
        np.sum((pack(one) - pack(Weights(l * two.o, l * two.V, two.K / l, two.Q / l))) ** 2)
        for l in grid
    ]
    assert apart(one, two).modulo == pytest.approx(min(tried), rel=1e-5)
    tensors = [np.multiply.outer(w.V.T @ w.o, (w.K.T @ w.Q)[:, :-1]) for w in (one, two)]
    assert apart(one, two).product == pytest.approx(np.sum((tensors[0] - tensors[1]) ** 2))
    assert balance(scaled) != pytest.approx(balance(one))


def test_softmax_alone_moves_along_the_valley_and_slower_on_longer_prompts():
    moved = {}
    for length in (1000, 100_000):
        found = pair_flows(LinearTask.isotropic(2), length, 1, [0.0, 40.0])
        for kind, flow in found.items():
            moved[kind, length] = abs(balance(flow.at(-1)) - balance(flow.at(0)))
    assert max(moved["linear", 1000], moved["linear", 100_000]) < 1e-3
    assert moved["softmax", 1000] > 4 * moved["softmax", 100_000] > 0.01


def test_the_flow_tells_what_training_ends_with(tmp_path: Path):
    """Isotropic covariates in five dimensions, L = 100: SGD leaves linear attention with seed 0 in
    the trap, the rest not.
    """
    trained = TrainSpec(
        covariances=("isotropic",),
        lengths=(100,),
        seeds=2,
        steps=2500,
        rate=0.02,
        records=2,
        final_evaluation=2000,
    )
    run = execute(trained, tmp_path / "train")
    spec = spec_beside(run.spec)
    assert (spec.starts, spec.training) == (2, 100.0)
    flowed = execute(spec.model_copy(update={"times": 8}), tmp_path / "flow")
    exact = trained_risks(run.table("final"), run.table("path"), 5, 0.1)
    table = beside_training(
        flowed.table("flows"), flowed.table("distance"), exact, run.table("distance")
    )
    assert list(
        table.query("flow_status == 'stuck'")[["seed", "model"]].itertuples(index=False, name=None)
    ) == [(0, "linear")]
    assert (table["flow_status"] == table["trained_status"]).all()
    assert table["trained"].to_numpy() == pytest.approx(table["flow"].to_numpy(), rel=0.05)
    with pytest.raises(ValueError, match="--train: expected one head trained by SGD"):
        spec_beside(run.spec | {"optimizer": "adam"})
