"""Rank correlations: scipy's own, with intervals that hold what they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from esscher.intervals import rank_correlation


def test_rho_is_scipys_with_ties() -> None:
    generator = np.random.default_rng(3)
    x = generator.normal(size=41)
    y = np.round(x + generator.normal(size=41), 0)  # ties
    rho, low, high = rank_correlation(x, y)
    assert rho == pytest.approx(scipy.stats.spearmanr(x, y).statistic, abs=1e-12)
    assert low < rho < high
    assert rank_correlation(x, y) == (rho, low, high)


def test_intervals_hold_the_truth() -> None:
    """Gaussian pairs of correlation r have rho = 6/pi asin(r/2); 72 pairs, 50 times, nominal 95 %.

    Fewer than 40 of 50 have a chance below 1e-3 if the coverage is 0.93, as Fisher's
    transform of 72 pairs at least has.
    """
    truth = 6 / math.pi * math.asin(0.6 / 2)
    generator = np.random.default_rng(8)
    inside = 0
    for _ in range(50):
        x = generator.normal(size=72)
        _, low, high = rank_correlation(x, 0.6 * x + 0.8 * generator.normal(size=72))
        inside += low <= truth <= high
    assert inside >= 40


def test_what_does_not_vary_has_no_rank() -> None:
    rho, low, high = rank_correlation(np.ones(9), np.arange(9.0))
    assert (math.isnan(rho), low, high) == (True, -1.0, 1.0)
    assert math.isnan(rank_correlation([0.0, 1.0, 2.0, 3.0, math.nan], np.arange(5.0)).value)
    rho, low, high = rank_correlation([0.0, 0.0, 0.0, 0.0, 1.0], np.arange(5.0))
    assert low <= rho <= high
