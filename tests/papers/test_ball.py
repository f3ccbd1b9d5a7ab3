"""Corollaries E.3 and E.5 over a ball, Lemmas E.2 and E.4, and Assumption 4.2 at a start."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from esscher.icl import (
    UV,
    Block,
    LinearTask,
    default_weights,
    flow_limit,
    risk,
    risk_gradient,
    start_block,
)
from esscher.icl.layer import tensors
from esscher.papers.statements import (
    assumption_numbers,
    ball_gaps,
    first_errors,
    lemma_e4,
    limit_norms,
)
from esscher.theory.training import lemma_e2_mended

TASK = LinearTask(0.3 * torch.eye(1), [[1.0]], 0.0)


def test_gaps_over_the_ball_lie_above_those_of_points_in_it() -> None:
    """Six random (U, V) of norm 2 rho: exact gaps of risks and gradients."""
    rho, rng = 0.2, np.random.default_rng(0)
    risks, gradients = ball_gaps(TASK, rho, [10, 1000, 10**6, 10**12], tasks=3)
    assert (np.diff(risks) < 0).all()
    # before, its logarithms grow faster than its powers fall
    assert gradients[3] < gradients[2]
    for _ in range(6):
        direction = rng.standard_normal(8)
        entries = 2 * rho * direction / np.linalg.norm(direction)
        params = UV(entries[:4].reshape(2, 2), entries[4:].reshape(2, 2))
        for i, n in enumerate((10, 1000)):
            gap = abs(risk(TASK, params, n).value - risk(TASK, params, math.inf).value)
            own, limit = (tensors(risk_gradient(TASK, params, m)[1]) for m in (n, math.inf))
            apart = math.sqrt(
                sum(float(((a - b) ** 2).sum()) for a, b in zip(own, limit, strict=True))
            )
            assert gap < risks[i]
            assert apart < gradients[i]
    larger = ball_gaps(TASK, 2 * rho, [10, 1000], tasks=3)
    assert (larger[0] > risks[:2]).all()
    assert (larger[1] > gradients[:2]).all()


def test_radius_of_a_flow_is_that_of_its_ends() -> None:
    """d = 1, W = 1, no noise: u = v grows from alpha to Sigma^{-1/2}, and |(u, v)| with it."""
    start = start_block(TASK)
    end = flow_limit(TASK, start)
    assert isinstance(end, Block)
    rho = assumption_numbers(TASK, start, [10])["rho"]
    assert rho == pytest.approx(math.hypot(float(end.U11), float(end.v)), rel=1e-6)
    assert rho == pytest.approx(math.sqrt(2 / 0.3), rel=1e-6)


def test_assumption_42_at_a_start() -> None:
    """W = 1, Sigma = 0.3, no noise: sigma_mu^2 = max(1, 0.3 (1 + zeta)), against 100,000 drawn
    tasks at 4 standard errors.
    """
    found = assumption_numbers(TASK, start_block(TASK), [10, 10**6])
    sigma2 = np.maximum(1.0, 0.3 * (1.0 + np.random.default_rng(1).standard_normal(100_000) ** 2))
    assert found["exponent"] == pytest.approx(1 / (192 * 4 * 2 / 0.3), rel=1e-6)
    for n, rate in zip((10, 10**6), found["rate"], strict=True):
        drawn = math.log(n) ** 4 * n ** (-found["exponent"] / sigma2)
        assert abs(drawn.mean() - rate) < 4 * drawn.std() / 100_000**0.5
    drawn = sigma2**6
    assert abs(drawn.mean() - found["sigma12"]) < 4 * drawn.std() / 100_000**0.5
    # the rate has not begun to fall at 10^6 tokens
    assert found["rate"][1] > found["rate"][0]
    assert found["falls_from"] > math.log(10) * 100
    assert found["query"] == pytest.approx(0.3)


PLANE = LinearTask.kms(2, 0.4, noise=0.2)


def test_norms_of_the_limit_are_those_of_drawn_tasks():
    """20,000 draws of (w, x_q), the limit and its gradient by autograd's rule written out; 4
    standard errors.
    """
    weights, generator = (
        default_weights(2, torch.Generator().manual_seed(3)).uv(),
        torch.Generator().manual_seed(5),
    )
    w = torch.randn(20_000, 2, dtype=torch.float64, generator=generator) @ PLANE.task_root.T
    x = torch.randn(20_000, 2, dtype=torch.float64, generator=generator) @ PLANE.root.T
    noise = PLANE.noise**0.5 * torch.randn(20_000, dtype=torch.float64, generator=generator)
    y = (w * x).sum(dim=1) + noise
    gram = torch.cat([torch.eye(2, dtype=torch.float64).expand(20_000, 2, 2), w[:, None]], dim=1)
    gamma = gram @ PLANE.sigma @ gram.mT
    gamma[:, -1, -1] += PLANE.noise
    query = torch.cat([x, torch.zeros(20_000, 1, dtype=torch.float64)], dim=1)
    tilt = query @ weights.U.mT
    by_r, by_theta = torch.einsum("nij,nj->ni", gamma, tilt), gamma @ weights.V[-1]
    limit = by_r @ weights.V[-1]
    gradient = (by_r**2).sum(dim=1) + (by_theta**2).sum(dim=1) * (query**2).sum(dim=1)
    drawn = (limit**2, gradient, y**2)
    for norm, values in zip(limit_norms(PLANE, weights), drawn, strict=True):
        assert abs(norm**2 - float(values.mean())) < 4 * float(values.std()) / 20_000**0.5


@pytest.mark.parametrize("length", [10, 1000])
def test_lemmas_e2_and_e4_lie_above_what_they_bound(length: int) -> None:
    assert lemma_e4(length)[0]
    task, weights, squared = first_errors(length)
    limit2, _, label = limit_norms(task, weights.uv())
    gap = abs(risk(task, weights, length).value - risk(task, weights, math.inf).value)
    assert 0 < gap < lemma_e2_mended(squared[:, 0].mean() ** 0.5, label, limit2)
