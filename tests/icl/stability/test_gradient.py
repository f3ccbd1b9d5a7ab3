"""The compiled risk against the closed forms, the quadrature of the block form, and differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from esscher.icl import OVKQ, Block, LinearTask, default_weights, risk, risk_gradient
from esscher.icl.stability.flow import pack, unpack, weight_flow, weight_hessian
from esscher.icl.stability.gradient import PopulationRisk
from esscher.icl.training.white import Weights, weights_of, whiten

TASK = LinearTask.kms(3, 0.4, noise=0.2)


def weights(seed: int = 0, scale: float = 1.0) -> tuple[OVKQ, Weights]:
    drawn = default_weights(3, torch.Generator().manual_seed(seed))
    params = OVKQ(*(scale * part for part in (drawn.O, drawn.V, drawn.K, drawn.Q)))
    return params, weights_of(params)


@pytest.mark.parametrize("length", [3, 70, math.inf])
def test_linear_attention_has_the_closed_form_and_its_gradient(length: float | int):
    params, own = weights(1, 1.7)
    value, slope = risk_gradient(TASK, params, length, "linear")
    found, gradient = PopulationRisk(TASK, length, "linear")(own)
    assert found == pytest.approx(value, rel=1e-13)
    assert isinstance(slope, OVKQ)
    expected = weights_of(slope)
    for one, two in zip(gradient, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-11, atol=1e-13)


def test_an_infinite_prompt_is_the_same_for_both():
    _, own = weights(2)
    assert (
        PopulationRisk(TASK, math.inf, "softmax")(own)[0]
        == PopulationRisk(TASK, math.inf, "linear")(own)[0]
    )


@pytest.mark.parametrize("length", [5, 200])
def test_softmax_in_the_block_form_has_the_error_of_the_quadrature(length: int):
    """The cubature of queries, four shells and directions exact to degree 5, is within 1e-3
    of it.
    """
    block = Block(0.5 * torch.linalg.inv(TASK.sigma), 1.4)
    rule = PopulationRisk(TASK, length, "softmax")
    white = np.zeros((4, 4))
    root = rule.task.root
    white[:3, :3], white[3, 3] = root[:3, :3].T @ block.U11.numpy() @ root[:3, :3], 1.4
    excess = float(risk(TASK, block, length)) - float(risk(TASK, block, math.inf))
    assert rule.white(white)[0] - float(risk(TASK, block, math.inf)) == pytest.approx(
        excess, rel=2e-3
    )


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_gradient_and_hessian_are_those_of_the_risk(kind: str):
    _, own = weights(3, 1.5)
    rule, state, step = PopulationRisk(TASK, 20, kind), pack(own), 1e-5
    gradient, hessian = pack(rule(own)[1]), weight_hessian(rule, own)
    for i in range(0, state.size, 5):
        unit = np.zeros_like(state)
        unit[i] = step
        ahead, behind = (rule(unpack(state + sign * unit, own)) for sign in (1, -1))
        assert gradient[i] == pytest.approx((ahead[0] - behind[0]) / (2 * step), abs=1e-8)
        np.testing.assert_allclose(
            hessian[i], (pack(ahead[1]) - pack(behind[1])) / (2 * step), atol=1e-7
        )


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_the_risk_has_its_symmetries(kind: str):
    """(a, r) -> (-a, -r) and (U, V) -> (-U, -V), for both kinds; the scale for linear attention
    alone.
    """
    _, own = weights(4, 1.5)
    rule = PopulationRisk(TASK, 20, kind)
    white = whiten(own, rule.task.root)
    value, mirrored, scaled = rule.white(white)[0], white.copy(), white.copy()
    mirrored[3, :3] *= -1
    mirrored[:3, 3] *= -1
    scaled[:, :3] *= 1.3
    scaled[:, 3] /= 1.3
    assert rule.white(mirrored)[0] == pytest.approx(value, rel=1e-12)
    assert rule.white(-white)[0] == pytest.approx(value, rel=1e-12)
    assert (abs(rule.white(scaled)[0] / value - 1) < 1e-12) == (kind == "linear")


def test_the_flow_is_gradient_descent_with_small_steps():
    _, own = weights(5)
    rule, times = PopulationRisk(TASK, 20, "linear"), np.array([0.0, 1.0, 4.0])
    flow = weight_flow(rule, own, times)
    state, step = pack(own), 1e-3
    for _ in range(4000):
        half = state - 0.5 * step * pack(rule(unpack(state, own))[1])  # midpoint rule
        state = state - step * pack(rule(unpack(half, own))[1])
    np.testing.assert_allclose(flow.states[-1], state, atol=2e-3)
    assert flow.mse[-1] == pytest.approx(2 * rule(unpack(state, own))[0], rel=1e-3)
    assert flow.mse[0] == pytest.approx(2 * rule(own)[0], rel=1e-14)
