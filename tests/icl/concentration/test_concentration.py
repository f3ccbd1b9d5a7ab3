"""Concentration: squared differences against autograd on prompts drawn token by token; exponents;
bounds lie above.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from esscher.icl import UV, LinearTask, default_weights, predict
from esscher.icl.concentration.bounds import bounds
from esscher.icl.concentration.errors import METRICS, prompt_errors, risk_gradient_errors
from esscher.icl.concentration.lemmas import limit_norms, risk_gaps
from esscher.icl.layer import OVKQ
from esscher.icl.tasks import Prompts

TASK = LinearTask.kms(2, 0.4, noise=0.2)


def direct_errors(weights: OVKQ, length: int, count: int) -> np.ndarray:
    """The same squares from tokens and autograd; the limit's output is r^T Gamma_w U z_q with
    Gamma_w from many tokens' law.
    """
    generator = torch.Generator().manual_seed(1)
    out = np.zeros((count, 2, len(METRICS)))
    w = torch.randn(count, 2, dtype=torch.float64, generator=generator) @ TASK.task_root.T
    for i in range(count):
        x = torch.randn(length + 1, 2, dtype=torch.float64, generator=generator) @ TASK.root.T
        y = x @ w[i] + TASK.noise**0.5 * torch.randn(
            length + 1, dtype=torch.float64, generator=generator
        )
        prompts = Prompts(x[None, :-1], y[None, :-1], x[-1:], y[-1:])
        gram = torch.cat([torch.eye(2, dtype=torch.float64), w[i][None]])
        gamma = gram @ TASK.sigma @ gram.T
        gamma[-1, -1] += TASK.noise
        found = []
        for kind in ("softmax", "linear", "limit"):
            parts = [
                part.clone().requires_grad_()
                for part in (weights.O, weights.V, weights.K, weights.Q)
            ]
            O, V, K, Q = parts
            U, value = K.T @ Q, O @ V
            U.retain_grad()
            value.retain_grad()
            if kind == "limit":
                f = value[-1] @ gamma @ U[:, :-1] @ x[-1]
            else:
                f = predict(UV(U, value), prompts, kind)[0]
            by_u, by_v = torch.autograd.grad(f, (U, value), retain_graph=True)
            by_all = torch.autograd.grad((f - y[-1]) ** 2, parts, retain_graph=True)
            by_k, by_q = torch.autograd.grad(f, (K, Q), retain_graph=True)
            found.append(
                (f.detach(), by_u, by_v, torch.cat([part.flatten() for part in by_all]), by_k, by_q)
            )
        for other in (1, 2):
            out[i, other - 1] = [
                float(((a - b) ** 2).sum()) for a, b in zip(found[0], found[other], strict=True)
            ]
    return out


@pytest.mark.parametrize("length", [6, 40])
def test_squared_differences_have_the_right_law(length: int):
    """Means of arcsinh and of its square over 3000 against 1000 prompts, 24 z-scores below 4.5;
    false alarms 1e-4.
    """
    weights = default_weights(2, torch.Generator().manual_seed(3))
    ours = np.arcsinh(10 * prompt_errors(TASK, weights, length, 3000, seed=2))
    theirs = np.arcsinh(10 * direct_errors(weights, length, 1000))
    for power in (1, 2):
        a, b = ours**power, theirs**power
        spread = np.sqrt(a.var(axis=0) / len(a) + b.var(axis=0) / len(b))
        assert (np.abs(a.mean(axis=0) - b.mean(axis=0)) < 4.5 * spread).all()


def test_output_falls_like_one_over_root_of_the_length():
    """Small scores: n times the mean square to the limit settles; ratio between 1000 and 10 000
    tokens within 15 % of 1.
    """
    weights = default_weights(2, torch.Generator().manual_seed(3))
    small = OVKQ(weights.O, weights.V, 0.3 * weights.K, weights.Q)
    squares = [
        n * prompt_errors(TASK, small, n, 4000, seed=n)[:, 1, 0].mean() for n in (1000, 10_000)
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


def test_norms_of_the_limit_are_those_of_drawn_tasks():
    """20,000 draws of (w, x_q), the limit and its gradient by autograd's rule written out; 4
    standard errors.
    """
    weights, generator = (
        default_weights(2, torch.Generator().manual_seed(3)).uv(),
        torch.Generator().manual_seed(5),
    )
    w = torch.randn(20_000, 2, dtype=torch.float64, generator=generator) @ TASK.task_root.T
    x = torch.randn(20_000, 2, dtype=torch.float64, generator=generator) @ TASK.root.T
    noise = TASK.noise**0.5 * torch.randn(20_000, dtype=torch.float64, generator=generator)
    y = (w * x).sum(dim=1) + noise
    gram = torch.cat([torch.eye(2, dtype=torch.float64).expand(20_000, 2, 2), w[:, None]], dim=1)
    gamma = gram @ TASK.sigma @ gram.mT
    gamma[:, -1, -1] += TASK.noise
    query = torch.cat([x, torch.zeros(20_000, 1, dtype=torch.float64)], dim=1)
    tilt = query @ weights.U.mT
    by_r, by_theta = torch.einsum("nij,nj->ni", gamma, tilt), gamma @ weights.V[-1]
    limit = by_r @ weights.V[-1]
    gradient = (by_r**2).sum(dim=1) + (by_theta**2).sum(dim=1) * (query**2).sum(dim=1)
    drawn = (limit**2, limit**4, gradient, y**2, y**4)
    for norm, power, values in zip(limit_norms(TASK, weights), (2, 4, 2, 2, 4), drawn, strict=True):
        assert abs(norm**power - float(values.mean())) < 4 * float(values.std()) / 20_000**0.5


def test_lemmas_e2_and_e4_lie_above_what_they_bound():
    weights = default_weights(2, torch.Generator().manual_seed(3))
    for length in (10, 1000):
        squared = prompt_errors(TASK, weights, length, 2000, seed=1)[:, 1]
        error2, gradient2 = (
            squared[:, 0].mean() ** 0.5,
            (squared[:, 1] + squared[:, 2]).mean() ** 0.5,
        )
        for row in risk_gaps(
            TASK, weights.uv(), length, error2, (squared[:, 0] ** 2).mean() ** 0.25, gradient2
        ):
            assert 0 < row["measured"] < row["mended"]


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
