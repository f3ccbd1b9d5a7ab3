"""Corollaries E.3 and E.5 over a ball, Lemmas E.1, E.2 and E.4."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from docs.theory.statements import (
    ball_gaps,
    first_errors,
    flow_bounds,
    lemma_e4,
    limit_norms,
)
from esscher.icl import (
    UV,
    LinearTask,
    default_weights,
    flow_limit,
    flow_times,
    gradient_flow,
    risk,
    risk_gradient,
    start_block,
)
from esscher.icl.layer import flatten, tensors, unflatten
from esscher.theory.boursier import lemma_e2_mended

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


def test_lemma_e_1_holds() -> None:
    task, times = LinearTask.isotropic(2), flow_times(4, 8)
    start = start_block(task)
    infinite = gradient_flow(task, start, math.inf, times=times)
    for length in (20, 10**4):
        finite = gradient_flow(task, start, length, times=times)
        bound, sharper, beta, curvature = flow_bounds(task, length, finite, infinite, 3)
        distance = np.linalg.norm(finite.states - infinite.states, axis=1)
        assert (distance <= sharper * (1 + 1e-6) + 1e-9).all()
        assert (sharper <= bound * (1 + 1e-12)).all()
        assert distance[-1] > 0
        # Constants against differences of the gradient at the common start, where the curvature is
        # negative.
        here, step = flatten(start), 1e-5
        columns = [
            flatten(risk_gradient(task, unflatten(here + sign * step * e, start), math.inf)[1])
            * sign
            / (2 * step)
            for e in np.eye(here.size)
            for sign in (1, -1)
        ]
        values = np.linalg.eigvalsh(np.array(columns).reshape(here.size, 2, -1).sum(axis=1))
        assert values[0] < -0.01
        assert curvature >= -values[0] - 1e-6
        assert beta >= np.abs(values).max() - 1e-6


def test_the_weights_are_largest_where_the_flow_of_assumption_42_ends() -> None:
    task = LinearTask.isotropic(5, np.eye(5), 0.0)
    flow = gradient_flow(task, start_block(task), times=flow_times(1e3, 20))
    norms, end = np.linalg.norm(flow.states, axis=1), flatten(flow_limit(task, start_block(task)))
    assert norms.max() == pytest.approx(np.linalg.norm(end), rel=1e-6)
