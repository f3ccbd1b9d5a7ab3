"""Traps are critical points, minima or saddles as a search around them finds, and where flows get
stuck.
"""

from __future__ import annotations

import numpy as np
import pytest

from esscher.icl import LinearTask
from esscher.icl.stability.gradient import PopulationRisk
from esscher.icl.stability.job import pair_flows
from esscher.icl.stability.traps import Trap, traps


def rule(trap: Trap, length: int, kind: str, values: list[float]) -> PopulationRisk:
    dim = trap.white.shape[0] - 1
    return PopulationRisk(LinearTask(np.diag(values), np.eye(dim) / dim), length, kind)


def test_isotropic_trap_of_linear_attention():
    """At L = 100 in five dimensions: one direction against the others, and flows from seed 0 end
    there.
    """
    task = LinearTask.isotropic(5)
    (trap,) = traps(task, 100, "linear")
    along = trap.white[5, 5] * np.diag(trap.white)[:5]
    assert (along < 0).sum() == 1
    assert trap.falling == 0
    assert trap.slope < 1e-10
    flows = pair_flows(task, 100, 0, [0.0, 1000.0])
    assert flows["linear"].mse[-1] == pytest.approx(trap.mse, rel=1e-6)
    assert flows["softmax"].mse[-1] < trap.mse


def test_a_minimum_is_below_its_surroundings():
    (trap,) = traps(LinearTask.isotropic(5), 100, "linear")
    risk, rng = rule(trap, 100, "linear", [1.0] * 5), np.random.default_rng(0)
    around = [
        2 * risk.white(trap.white + 0.02 * rng.standard_normal(trap.white.shape))[0]
        for _ in range(200)
    ]
    assert min(around) > trap.mse - 1e-12


def test_saddles_of_a_covariance_with_distinct_eigenvalues():
    """0.5^|i-j|, L = 1000: a trap for each eigenvector, the direction with the least variance a
    minimum, the others saddles.
    """
    task = LinearTask.kms(5, 0.5)
    found = traps(task, 1000, "linear")
    assert [trap.falling for trap in found] == [4, 3, 2, 1, 0]
    assert np.all(np.diff([trap.variance for trap in found]) < 0)
    assert np.all(np.diff([trap.mse for trap in found]) < 0)
    saddle, values = found[0], np.linalg.eigvalsh(task.sigma.numpy())
    risk = rule(saddle, 1000, "linear", values.tolist())
    rng = np.random.default_rng(1)
    lower = saddle.white
    for _ in range(3000):  # a descent from beside the saddle passes below it
        lower = (
            lower
            + 0.02 * rng.standard_normal(lower.shape) * (lower is saddle.white)
            - 0.02 * risk.white(lower)[1]
        )
    assert 2 * risk.white(lower)[0] < saddle.mse


def test_no_trap_on_short_prompts():
    assert traps(LinearTask.isotropic(5), 10, "linear") == []


def test_tasks_with_other_axes_are_refused():
    with pytest.raises(ValueError, match="task_cov: expected the eigenvectors"):
        traps(LinearTask(np.diag([1.0, 2.0]), [[1.0, 0.5], [0.5, 1.0]]), 10)
