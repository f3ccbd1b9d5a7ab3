"""Isotropic against other covariates: what is left over the noise at the end of the flow of linear
attention.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from esscher.icl import LinearTask, flow_limit, risk, start_block


def excess(values: np.ndarray, length: int, noise: float) -> float:
    """1/2 sum_i c_i q_i / (c_i + q_i), c_i = lambda_i / d, q_i = (sum c + tau^2 + c_i) / L."""
    c = values / values.size
    q = (c.sum() + noise + c) / length
    return float(0.5 * np.sum(c * q / (c + q)))


@pytest.mark.parametrize("length", [3, 100, 10_000])
def test_isotropic_covariates_leave_the_largest_excess_of_their_trace(length: int):
    rng = np.random.default_rng(length)
    largest = excess(np.ones(4), length, 0.2)
    for _ in range(5):
        values = rng.dirichlet(np.ones(4)) * 4
        task = LinearTask(np.diag(values), noise=0.2)
        found = (
            float(risk(task, flow_limit(task, start_block(task), length), length, "linear")) - 0.1
        )
        assert found == pytest.approx(excess(values, length, 0.2), rel=1e-9)
        assert found < largest
        assert length * excess(values, length * 10**6, 0.2) * 10**6 == pytest.approx(
            0.5 * (4 * 1.2 + 1), rel=1e-4
        )


def test_the_constant_is_the_same_for_all_of_a_trace():
    tasks = LinearTask.isotropic(5), LinearTask.kms(5, 0.5)
    ends = [
        1e9
        * (float(risk(task, flow_limit(task, start_block(task), 10**9), 10**9, "linear")) - 0.05)
        for task in tasks
    ]
    assert ends == pytest.approx([3.25, 3.25], rel=1e-4)
    assert math.isclose(float(tasks[1].sigma.trace()), 5.0)
