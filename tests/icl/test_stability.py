"""Flows of (O, V, K, Q): against small steps of gradient descent, in which direction weights move,
the run, the test between the models, distances, and training beside them.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binom

from esscher.icl import OVKQ, LinearTask, default_weights, gradient_flow, risk, risk_gradient
from esscher.icl.layer import flatten, unflatten
from esscher.icl.quadrature import product_rule
from esscher.icl.specs import StabilitySpec, TrainSpec
from esscher.icl.stability import (
    ABOVE,
    ALL,
    apart,
    backtracking,
    flow_end,
    pair_flows,
    verdict,
)
from esscher.runs import execute, find_job, resume

TASK = LinearTask.kms(3, 0.4, noise=0.2)
RULE = product_rule(3, 1, 0, (2, 4))


def weights(seed: int = 0, scale: float = 1.0) -> OVKQ:
    drawn = default_weights(3, torch.Generator().manual_seed(seed))
    return unflatten(scale * flatten(drawn), drawn)


def test_the_flow_is_gradient_descent_with_small_steps() -> None:
    own = weights(5)
    flow = gradient_flow(TASK, own, 20, "linear", [0.0, 1.0, 4.0], rtol=1e-4, atol=1e-6)

    def slope(state: np.ndarray) -> np.ndarray:
        return flatten(risk_gradient(TASK, unflatten(state, own), 20, "linear")[1])

    state, step = flatten(own), 4e-3
    for _ in range(1000):
        state = state - step * slope(state - 0.5 * step * slope(state))  # midpoint rule
    np.testing.assert_allclose(flow.states[-1], state, atol=2e-3)
    assert flow.risks[0] == pytest.approx(risk_gradient(TASK, own, 20, "linear")[0], rel=1e-12)


def test_flows_get_stuck_where_training_does() -> None:
    """Isotropic covariates in five dimensions, L = 100: linear attention from seed 0 stays at an
    error of 0.367, softmax attention does not.
    """
    flows = pair_flows(LinearTask.isotropic(5), 100, 0, [0.0, 1000.0])
    assert 2 * flows["linear"].risks[-1] == pytest.approx(0.36735, abs=1e-5)
    assert 2 * flows["softmax"].risks[-1] == pytest.approx(0.25866, abs=1e-5)


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
    assert set(run.tables) == {"flows", "distance", "verdict", "backtracking"}
    assert len(run.table("flows")) == 3 * 2
    before = {name: (tmp_path / "run" / f"{name}.parquet").read_bytes() for name in run.tables}
    (tmp_path / "run" / "shards" / "000001.parquet").unlink()
    resume(tmp_path / "run")
    for name, content in before.items():
        assert (tmp_path / "run" / f"{name}.parquet").read_bytes() == content


def test_a_run_that_is_stopped_has_all_settings():
    spec = SMALL.model_copy(update={"lengths": (10, 40)})
    assert [(unit["first"], unit["length"]) for unit in find_job("icl-stability").units(spec)] == [
        (0, 10),
        (0, 40),
        (2, 10),
        (2, 40),
    ]


def flows(stuck: dict[tuple[str, int], list[tuple[bool, bool]]]) -> pd.DataFrame:
    """A table of starts that are stuck (softmax, linear) in some settings."""
    rows = []
    for (covariance, length), starts in stuck.items():
        for seed, pair in enumerate(starts):
            for model, there in zip(("softmax", "linear"), pair, strict=True):
                row = {"covariance": covariance, "length": length, "seed": seed, "model": model}
                rows.append(row | {"status": "stuck" if there else "ok"})
    return pd.DataFrame(rows)


def test_a_monotone_distance_undoes_nothing():
    """Up by 2 and down by 1 in logarithms: of 3 steps 2 are undone. The start is equal."""
    paths = {0: [0.0, 1.0, math.e, math.e**3], 1: [0.0, 1.0, math.e**2, math.e]}
    rows = [
        {"covariance": name, "length": 10, "seed": seed, "weights2": value}
        for name, seeds in (("a", (0, 0)), ("b", (1, 1)))
        for number, path in enumerate(seeds)
        for seed, value in ((number, value) for value in paths[path])
    ]
    found = backtracking(pd.DataFrame(rows)).set_index("covariance")["undone"]
    assert found.to_dict() == pytest.approx({"a": 0.0, "b": 2 / 3})


def test_verdict_counts_starts_that_tell_the_models_apart():
    one = [(True, True)] * 2 + [(False, True)] * 6 + [(False, False)] * 2
    two = [(False, False)] * 9 + [(True, False)]
    table = verdict(flows({("isotropic", 10): one, ("isotropic", 100): two}))
    first, second, total = table.to_dict("records")
    assert (first["only_linear"], first["only_softmax"]) == (6, 0)
    assert (second["only_linear"], second["only_softmax"]) == (0, 1)
    assert (first["softmax"], first["linear"]) == (0.2, 0.8)
    assert (total["covariance"], total["only_linear"], total["only_softmax"]) == (ALL, 6, 1)
    assert total["p"] == pytest.approx(2 * binom.cdf(1, 7, 0.5))
    assert total["linear"] == 0.4


def scaled(params: OVKQ, l: float) -> OVKQ:
    return OVKQ(l * params.O, l * params.V, params.K / l, params.Q / l)


def vector(params: OVKQ) -> np.ndarray:
    parts = (params.O[-1], params.V, params.K, params.Q)
    return np.concatenate([part.numpy().ravel() for part in parts])


def test_distances_of_the_weights_and_of_what_they_compute():
    one, two = weights(0), weights(1)
    plain, product = apart(scaled(one, 1.4), one)
    assert plain == pytest.approx(np.sum((vector(scaled(one, 1.4)) - vector(one)) ** 2))
    assert product < 1e-15
    tensors = [np.multiply.outer(w.uv().V[-1], w.uv().U[:, :-1]) for w in (one, two)]
    assert apart(one, two)[1] == pytest.approx(np.sum((tensors[0] - tensors[1]) ** 2))


def test_softmax_alone_moves_along_the_valley_and_slower_on_longer_prompts():
    """|K|^2 + |Q|^2 - |o|^2 - |V|^2 is kept by linear attention."""

    def balance(params: OVKQ) -> float:
        o, V, K, Q = (
            float((part**2).sum()) for part in (params.O[-1], params.V, params.K, params.Q)
        )
        return K + Q - o - V

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
    task, stuck = LinearTask.isotropic(5), []
    ends = {kind: flow_end(task, 100, kind) for kind in ("softmax", "linear")}
    flows = {seed: pair_flows(task, 100, seed, [0.0, 100.0]) for seed in (0, 1)}
    for row in run.table("final").to_dict("records"):
        error = 2 * float(flows[row["seed"]][row["model"]].risks[-1])
        weights = OVKQ(*(np.reshape(row[name], (6, 6)) for name in "OVKQ"))
        exact = 2 * float(risk(task, weights, 100, row["model"]))
        assert exact == pytest.approx(error, rel=0.05)
        late, trained_late = (value > (1 + ABOVE) * ends[row["model"]] for value in (error, exact))
        assert late == trained_late == (row["status"] != "ok")
        if late:
            stuck.append((row["seed"], row["model"]))
    assert stuck == [(0, "linear")]
