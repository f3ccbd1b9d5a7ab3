"""Concentration: squared differences against autograd on the same prompts; exponents; bounds lie
above.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from esscher.icl import UV, LinearTask, default_weights, predict
from esscher.icl.concentration import (
    METRICS,
    bounds,
    prompt_errors,
    risk_gradient_errors,
)
from esscher.icl.layer import OVKQ
from esscher.icl.specs import ConcentrationSpec
from esscher.icl.training import batches
from esscher.runs import execute

TASK = LinearTask.kms(2, 0.4, noise=0.2)


def test_squared_differences_are_autograds_on_the_same_prompts():
    """20 prompts of 6 tokens; the limit's output is r^T Gamma_w U z_q."""
    weights = default_weights(2, torch.Generator().manual_seed(3))
    ours = prompt_errors(TASK, weights, 6, 20, seed=2)
    ((drawn,),) = batches(TASK, 6, 20, 1, torch.Generator().manual_seed(2))
    for i in range(20):
        prompts, query, label = drawn.part(i, i + 1), drawn.query[i], drawn.target[i : i + 1]
        gram = torch.cat([torch.eye(2, dtype=torch.float64), drawn.w[i : i + 1]])
        gamma = gram @ TASK.sigma @ gram.T + torch.diag(
            torch.tensor([0.0, 0.0, TASK.noise], dtype=torch.float64)
        )
        found = []
        for kind in ("softmax", "linear", "limit"):
            O, V, K, Q = parts = [
                part.clone().requires_grad_()
                for part in (weights.O, weights.V, weights.K, weights.Q)
            ]
            U, value = K.T @ Q, O @ V
            if kind == "limit":
                f = value[-1] @ gamma @ U[:, :-1] @ query
            else:
                f = predict(UV(U, value), prompts, kind)[0]
            by_u, by_v, by_k, by_q = torch.autograd.grad(f, (U, value, K, Q), retain_graph=True)
            by_all = torch.autograd.grad((f - label[0]) ** 2, parts)
            loss = torch.cat([part.flatten() for part in by_all])
            found.append((f.detach(), by_u, by_v, loss, by_k, by_q))
        for other in (1, 2):
            pairs = zip(found[0], found[other], strict=True)
            squares = [float(((a - b) ** 2).sum()) for a, b in pairs]
            np.testing.assert_allclose(ours[i, other - 1], squares, rtol=1e-9)


def test_output_falls_like_one_over_root_of_the_length():
    """Small scores: n times the mean square to the limit settles; ratio between 1000 and 10 000
    tokens within 15 % of 1.
    """
    weights = default_weights(2, torch.Generator().manual_seed(3))
    small = OVKQ(weights.O, weights.V, 0.3 * weights.K, weights.Q)
    squares = [
        n * prompt_errors(TASK, small, n, 2000, seed=n)[:, 1, 0].mean() for n in (1000, 10_000)
    ]
    assert squares[1] == pytest.approx(squares[0], rel=0.15)


def test_difference_of_risk_gradients_falls_like_one_over_the_length():
    weights = default_weights(2, torch.Generator().manual_seed(3))
    small = OVKQ(weights.O, weights.V, 0.3 * weights.K, weights.Q)
    far, near = (risk_gradient_errors(TASK, small, n) for n in (1000, 10_000))
    np.testing.assert_allclose(far / near, 10.0, rtol=0.02)


def test_proved_bounds_lie_above_the_measured_errors():
    weights = default_weights(2, torch.Generator().manual_seed(3))
    n = [10, 1000]
    table = bounds(TASK, weights, n)
    assert set(table["metric"]) == {*METRICS} - {"gradient"}
    for length in n:
        rms = np.sqrt(prompt_errors(TASK, weights, length, 2000, seed=1)[:, 1].mean(axis=0))
        for metric, height in zip(METRICS, rms, strict=True):
            assert (
                metric == "gradient"
                or (
                    table[(table["metric"] == metric) & (table["n"] == length)]["rms"] > height
                ).all()
            )


def test_gradients_in_k_and_q_scale_with_the_other_map():
    """10 Q and K / 10 have the same U: the output's gradient in K is 10 times as large, that in Q a
    tenth, the others stay.
    """
    weights = default_weights(2, torch.Generator().manual_seed(3))
    turned = OVKQ(weights.O, weights.V, 0.1 * weights.K, 10 * weights.Q)
    one, other = (prompt_errors(TASK, each, 20, 50, seed=4) for each in (weights, turned))
    factor = dict.fromkeys(METRICS, 1.0) | {"gradient_K": 100.0, "gradient_Q": 0.01}
    for i, metric in enumerate(METRICS):
        if metric != "gradient":
            np.testing.assert_allclose(other[..., i], factor[metric] * one[..., i], rtol=1e-6)


def test_concentration_run(tmp_path: Path):
    spec = ConcentrationSpec(
        dim=2, covariances=("isotropic",), lengths=(10, 100, 1000, 10_000), repeats=8, prompts=128
    )
    run = execute(spec, tmp_path / "run")
    rates = run.table("rates").set_index(["metric", "against"])
    assert 0.4 < rates.loc[("output", "linear"), "exponent"] < 0.6
    assert 0.8 < rates.loc[("risk_gradient", "limit"), "exponent"] < 1.1
    assert (rates["low"] <= rates["high"]).all()
    assert set(run.tables) == {"errors", "exact", "curves", "rates", "bounds"}
