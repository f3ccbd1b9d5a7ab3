"""Statistics from binned masses against the scores themselves, and verdicts on known laws of
scores.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch import Tensor

from esscher.errors import grid as deposit
from esscher.tails.scores import (
    GAUSSIAN_SURVIVAL,
    SURVIVAL_AT,
    Floats,
    score_statistics,
    tail_verdict,
)


def deposited(scores: Tensor, grid: deposit.Grid) -> deposit.Deposit:
    state = deposit.init(scores.shape[0], grid, torch.zeros(1, dtype=torch.float64))
    return deposit.update(state, scores, torch.zeros(scores.shape[1], 1, dtype=torch.float64))


def survival_of(scores: Tensor, grid: deposit.Grid) -> Floats:
    return score_statistics(deposited(scores, grid))["survival"].mean(0)


COARSE, FINE = deposit.Grid(1 / 8, 4, 1e-6), deposit.Grid(1 / 8, 8, 1e-10)


def gaussian(deviations: list[float], keys: int, seed: int = 3) -> Tensor:
    """Queries of these deviations on the same keys, with means 0, 1, 2, ..."""
    normal = torch.randn(
        len(deviations), keys, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return (
        normal * torch.tensor(deviations, dtype=torch.float64)[:, None]
        + torch.arange(len(deviations))[:, None]
    )


@pytest.mark.parametrize(("grid", "accuracy"), [(COARSE, 2e-5), (FINE, 1e-9)])
def test_softmax_statistics_equal_brute_force(grid: deposit.Grid, accuracy: float) -> None:
    scores = gaussian([0.05, 0.5, 1.0, 3.0, 12.0], 5003)
    state = deposited(scores, grid)
    found = score_statistics(state)
    p = scores.softmax(1)
    np.testing.assert_allclose(found["effective"], 1 / p.square().sum(1), rtol=accuracy)
    np.testing.assert_allclose(found["sd"], scores.std(1, correction=0), rtol=1e-7)


def test_even_weights_and_a_single_key() -> None:
    state = deposited(torch.full((1, 64), 0.3, dtype=torch.float64), COARSE)
    found = score_statistics(state)
    assert found["effective"][0] == pytest.approx(64, rel=2e-5)
    assert found["sd"][0] == pytest.approx(0, abs=1e-6)


def test_the_shape_equals_that_of_the_scores() -> None:
    """Survival against the standardised scores themselves, on a skewed law."""
    generator = torch.Generator().manual_seed(9)
    scores = torch.stack(
        [
            torch.randn(100_003, 4, dtype=torch.float64, generator=generator).square().sum(1) * c
            for c in (0.3, 1)
        ]
    )
    found = survival_of(scores, COARSE)
    z = (
        (scores - scores.mean(1, keepdim=True)) / scores.std(1, keepdim=True, correction=0)
    ).numpy()
    for at, above in zip(SURVIVAL_AT[:5], found[:5], strict=True):
        assert above == pytest.approx((z > at).mean(), rel=0.03, abs=1e-5)
    assert tail_verdict(found, float(scores.shape[1])) == "heavier"


def test_gaussian_scores_look_gaussian() -> None:
    """The masses of exact Gaussian laws, each cell's by its integral against the B-spline: no
    sampling error at all.
    """
    spacing, points = 1 / 8, 4
    deviations, means = np.array([0.26, 0.5, 2.0]), np.array([0.1, -3.0, 7.0])
    cells = np.arange(-300, 300)
    fine = (np.arange(-12 * 1000, 12 * 1000) + 0.5) / 1000  # z of a fine midpoint rule
    mass = np.zeros((3, cells.size))
    for i in range(3):
        x = (means[i] + deviations[i] * fine) / spacing
        for tap in range(points):
            u = x - np.floor(x) + (points - 1 - tap)
            weight = (
                sum((-1) ** k * math.comb(4, k) * np.maximum(u - k, 0) ** 3 for k in range(5)) / 6
            )
            np.add.at(
                mass[i],
                np.floor(x).astype(int) - (points - 1) + tap + 300,
                weight * scipy.stats.norm.pdf(fine) / 1000,
            )
    masses = torch.from_numpy(1e6 * mass)
    end = torch.full((3,), int(cells[-1]) + 1)
    state = deposit.Deposit(COARSE, torch.zeros(0), torch.stack([masses, masses]), end, end, end)
    found = score_statistics(state)["survival"].mean(0)
    # at two cells a deviation the cells show in the far tail
    np.testing.assert_allclose(found[:3], GAUSSIAN_SURVIVAL[:3], rtol=0.03)
    assert found[3] == pytest.approx(GAUSSIAN_SURVIVAL[3], rel=0.1)
    assert tail_verdict(found, 1e6) == "sub-Gaussian"


def test_verdicts() -> None:
    generator = torch.Generator().manual_seed(5)
    uniform = torch.rand(4, 20_000, dtype=torch.float64, generator=generator) * 5
    laplace = torch.empty(4, 20_000, dtype=torch.float64).exponential_(generator=generator)
    laplace *= torch.where(torch.rand(4, 20_000, generator=generator) < 0.5, -1.0, 1.0)
    known = {"sub-Gaussian": gaussian([1, 1.5, 2, 3], 20_000)}
    known |= {"lighter": uniform, "heavier": laplace}
    for verdict, scores in known.items():
        assert tail_verdict(survival_of(scores, COARSE), 20_000.0) == verdict


def test_flat_scores_are_left_out() -> None:
    found = score_statistics(deposited(gaussian([0.01, 2.0], 20_000), COARSE))["survival"]
    assert np.isnan(found[0]).all()
    assert tail_verdict(found[0], 20_000.0) == "unknown"
    assert tail_verdict(found[1], 20_000.0) == "sub-Gaussian"
    assert tail_verdict(found[1], 20.0) == "unknown"
