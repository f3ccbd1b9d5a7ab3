"""Queries of another covariance than the prompt's [S, Remark 4.1]."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from esscher.icl import UV, Block, LinearTask, final_parameters, start_block
from esscher.icl.exact import risk, risk_gradient
from esscher.icl.layer import flatten, unflatten
from esscher.icl.quadrature import product_rule
from esscher.icl.training import sampled_risk

SHIFTED = LinearTask(
    [[1.0, 0.4], [0.4, 0.5]],
    [[0.6, -0.1], [-0.1, 0.9]],
    0.2,
    query_sigma=[[0.7, -0.3], [-0.3, 1.1]],
)


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_shifted_queries_against_simulation(kind: str) -> None:
    """Queries of another covariance than the prompt's [S, Remark 4.1]: 4 comparisons within 3.5
    standard errors.
    """
    block, uv = (
        Block([[0.8, -0.3], [0.5, 0.4]], 0.9),
        UV(0.4 * np.eye(3)[::-1].copy(), np.full((3, 3), 0.3)),
    )
    for params in (block, uv):
        exact = risk(SHIFTED, params, 9, kind)
        generator = torch.Generator().manual_seed(1)
        drawn = sampled_risk(SHIFTED, params, 9, kind, 60_000, generator)
        assert abs(exact.value - drawn.value) < 3.5 * math.hypot(exact.error, drawn.error)
        plain = risk(LinearTask(SHIFTED.sigma, SHIFTED.task_cov, 0.2), params, 9, kind)
        assert abs(exact.value - plain.value) > 5 * drawn.error


@pytest.mark.parametrize(
    "params", [Block([[0.8, -0.3], [0.5, 0.4]], 0.9), UV(0.4 * np.eye(3), np.full((3, 3), 0.3))]
)
def test_gradient_for_shifted_queries_equals_finite_differences(params: Block | UV) -> None:
    rule, step = product_rule(2, 2), 1e-4
    for kind in ("softmax", "linear"):
        value, gradient = risk_gradient(SHIFTED, params, 9, kind, rule)
        assert value == pytest.approx(risk(SHIFTED, params, 9, kind, rule).value, rel=1e-8)
        direction = np.random.default_rng(3).standard_normal(flatten(params).size)
        ends = [
            risk_gradient(
                SHIFTED,
                unflatten(flatten(params) + side * step * direction, params),
                9,
                kind,
                rule,
            )[0]
            for side in (1, -1)
        ]
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(
            float(direction @ flatten(gradient)), rel=1e-5, abs=1e-7
        )


def test_shifted_queries_do_not_move_the_end_of_the_linear_flow() -> None:
    """The minimum of the linear risk is Sigma_L^{-1} whatever the queries are; only singular
    covariances are refused.
    """
    plain = LinearTask(SHIFTED.sigma, SHIFTED.task_cov, 0.2)
    start = start_block(plain)
    end = final_parameters(SHIFTED, start, 9, "linear")
    np.testing.assert_allclose(
        flatten(end), flatten(final_parameters(plain, start, 9, "linear")), rtol=1e-12
    )
    assert np.linalg.norm(flatten(risk_gradient(SHIFTED, end, 9, "linear")[1])) < 1e-12
    flat = plain.with_queries([[1.0, 0.0], [0.0, 0.0]])
    with pytest.raises(ValueError, match="query_sigma: expected both covariances invertible"):
        final_parameters(flat, start, 9, "linear")
