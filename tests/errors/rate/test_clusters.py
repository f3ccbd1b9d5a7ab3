"""Rates of exact curves whose queries come in clusters."""

from __future__ import annotations

import numpy as np
import pytest

from esscher.errors.curve import ErrorCurve, QueryErrors
from esscher.errors.rate import fit_rate

N = np.array([16, 32, 64, 128, 256, 512])


def clustered(mse: np.ndarray, clusters: np.ndarray | None) -> ErrorCurve:
    """A curve of queries with these squared errors."""
    rows = len(mse)
    ones = np.ones(rows)
    queries = QueryErrors(
        mse, np.ones_like(mse), np.ones((rows, 2)), ones, dmse_dlogn=-mse, clusters=clusters
    )
    return ErrorCurve.from_queries(N, queries, kind="exact", origin="made")


def made(windows: int, each: int, seed: int, spread: float = 0.2) -> tuple[np.ndarray, np.ndarray]:
    """Squared errors n^(-2 b) of queries whose exponents b are those of their windows, 0.4 on
    average.
    """
    random = np.random.default_rng(seed)
    exponents = np.repeat(0.4 + spread * random.standard_normal(windows), each)
    sizes = np.exp(0.3 * random.standard_normal(windows * each))
    return sizes[:, None] * (N / 100.0) ** (-2 * exponents[:, None]), np.repeat(
        np.arange(windows), each
    )


def test_the_interval_is_that_of_windows_drawn_one_by_one() -> None:
    """Against the bootstrap written out: draw windows, pool their queries, fit by polyfit, take
    quantiles.

    Other draws than the fit's own: ends of 400 and of 4000 resamples differ by at most a tenth of
    the width, about four standard errors of a 2.5 % quantile of 400.
    """
    mse, windows = made(12, 5, 0)
    fit = fit_rate(clustered(mse, 7 - windows))  # whatever the windows are called
    random, drawn = np.random.default_rng(99), []
    for _ in range(4000):
        rows = np.concatenate(
            [np.flatnonzero(windows == window) for window in random.integers(12, size=12)]
        )
        drawn.append(-np.polyfit(np.log(N), 0.5 * np.log(mse[rows].mean(axis=0)), 1)[0])
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert fit.interval == pytest.approx((low, high), abs=0.1 * (high - low))
    assert fit.stderr == pytest.approx(np.std(drawn), rel=0.15)
    assert fit.exponent == pytest.approx(
        -np.polyfit(np.log(N), 0.5 * np.log(mse.mean(axis=0)), 1)[0], rel=1e-12
    )
    assert fit.status.code == "exact"
    assert "12 clusters" in fit.status.text


def test_windows_are_resampled_with_their_queries() -> None:
    """Queries of one window are alike: taken each for itself, the interval of ten queries a window
    would be far too short.
    """
    mse, windows = made(12, 10, 1)
    widths = [
        np.ptp(fit_rate(clustered(mse, clusters)).interval)
        for clusters in (windows, np.arange(len(mse)))
    ]
    assert widths[0] > 2 * widths[1]


def test_level_window_and_seed_are_those_of_every_fit() -> None:
    curve = clustered(*made(12, 5, 2))
    widths = [np.ptp(fit_rate(curve, level=level).interval) for level in (0.5, 0.8, 0.95)]
    assert widths == sorted(widths)
    assert (
        fit_rate(curve, seed=1).interval
        == fit_rate(curve, seed=1).interval
        != fit_rate(curve, seed=2).interval
    )
    assert fit_rate(curve, window=(30, 300)).n.tolist() == [32, 64, 128, 256]


def test_one_window_has_no_interval_over_windows() -> None:
    """Nothing to resample: the interval is that of any exact curve, the range of local slopes, and
    not one of width 0.
    """
    mse, _ = made(1, 5, 3)
    mse += 0.01
    bare, one = (
        fit_rate(clustered(mse, None)),
        fit_rate(clustered(mse, np.zeros(5, dtype=np.int64))),
    )
    assert one.interval == bare.interval
    assert np.ptp(one.interval) > 0.05
    assert "local slopes" in one.status.text


def test_draws_of_windows_without_error_are_left_out() -> None:
    """Two of three windows have no error: one draw in 3.4 holds only these and has no logarithm."""
    mse, windows = made(3, 5, 4)
    mse[:10] = 0.0
    fit = fit_rate(clustered(mse, windows))
    assert np.isfinite(fit.interval).all()
    assert fit.interval[0] - 1e-12 <= fit.exponent <= fit.interval[1] + 1e-12
