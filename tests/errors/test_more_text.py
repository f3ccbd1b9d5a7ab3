"""Intervals for an endless text: by hand, on numbers whose limit is known, and how often they cover
it.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from esscher.errors.more_text import (
    BEYOND,
    CONVERGED,
    NOT_CONVERGED,
    PIECES,
    extrapolate,
    jackknife_variance,
    other_text,
)

ONE = (np.array([0.1]), np.array([0.12]))  # near, far


def of(
    sizes: tuple[float, float, float, float], spread: float = 0.0, **known: object
) -> tuple[float, float, float, str]:
    """One number on an eighth, a quarter, half and all of a pool; pieces change it by ``spread`` to
    and fro.
    """
    eighth, quarter, half, whole = (np.array([value]) for value in sizes)
    change = spread * np.array([[1.0], [-1.0]] * (PIECES // 2))
    without = (whole + change, np.repeat(whole[None], PIECES, axis=0))
    inside = np.array([known.pop("inside", True)])
    found = extrapolate(whole, (whole, half, quarter, eighth), without, *ONE, inside, **known)  # type: ignore[arg-type]
    return float(found.estimate[0]), float(found.low[0]), float(found.high[0]), str(found.status[0])


def test_changes_that_shrink_by_a_third_end_where_they_must() -> None:
    """T(N) = 1 - c N^-log2(3/2): the estimate is 1 whatever c is."""
    for c in (0.03, -0.2, 1e-6):
        sizes = tuple(1 - c * (2 / 3) ** halvings for halvings in range(4))
        assert of(sizes)[0] == pytest.approx(1, abs=1e-12)  # type: ignore[arg-type]


def test_the_interval_by_hand() -> None:
    estimate, low, high, status = of((0.9, 0.93, 0.95, 0.96), spread=0.002)
    t = stats.t.ppf(0.95, PIECES - 1)
    stderr = math.sqrt((PIECES - 1) / PIECES * PIECES * 0.002**2)
    doubt = math.hypot(
        0.75 * math.sqrt((0.01**2 + (0.02 * 2 / 3) ** 2 + (0.03 * 4 / 9) ** 2) / 3), 0.1 / 20
    )
    assert (estimate, status) == (pytest.approx(0.98), CONVERGED)
    assert high - estimate == pytest.approx(t * math.hypot(stderr, doubt), rel=1e-12)
    assert estimate - low == pytest.approx(high - estimate, rel=1e-12)
    assert of((0.9, 0.93, 0.95, 0.96), spread=0.002, alike=4.0)[2] - estimate == pytest.approx(
        t * math.hypot(2 * stderr, doubt), rel=1e-12
    )


@pytest.mark.parametrize(
    ("sizes", "known", "status", "ends"),
    [
        ((1.0, 1.0, 1.0, 1.0), {}, CONVERGED, (True, True)),
        ((0.66, 0.8, 0.89, 0.95), {}, NOT_CONVERGED, (True, True)),
        ((0.7, 0.8, 0.9, 1.0), {}, BEYOND, (True, False)),  # changes do not shrink
        ((1.0, 0.9, 0.8, 0.7), {}, BEYOND, (False, True)),  # nor downwards
        # a doubling changes it by more than 0.12
        ((0.0, 0.5, 0.8, 0.95), {}, BEYOND, (True, False)),
        # read at an n beyond the pool, at rest
        ((0.99, 0.99, 1.0, 1.0), {"inside": False}, BEYOND, (False, True)),
        ((0.97, 0.98, 0.99, 1.0), {"inside": False}, BEYOND, (True, False)),
        ((1.0, 1.0, 1.0, 1.0), {"frozen": True}, BEYOND, (False, False)),
        ((0.7, 0.8, 0.9, 1.0), {"frozen": True}, BEYOND, (True, False)),
        ((math.nan, 1.0, 1.0, 1.0), {}, BEYOND, (False, True)),  # an eighth has no such number
        ((1.0, 1.0, 1.0, math.nan), {}, BEYOND, (False, False)),
        # changes do not shrink, but are too small to matter
        ((0.999, 0.9992, 0.9995, 1.0), {}, CONVERGED, (True, True)),
    ],
)
def test_statuses(
    sizes: tuple[float, float, float, float],
    known: dict[str, bool],
    status: str,
    ends: tuple[bool, bool],
) -> None:
    _, low, high, found = of(sizes, **known)
    assert found == status
    assert (math.isfinite(low), math.isfinite(high)) == ends


def test_keys_and_queries_of_a_piece_do_not_cancel() -> None:
    """Where they go together the variance is that of their sum, where they seem to cancel that of
    each alone.
    """
    rng = np.random.default_rng(3)
    x = rng.standard_normal((PIECES, 1))
    alone = jackknife_variance(x, 0 * x)
    assert alone == pytest.approx((PIECES - 1) ** 2 / PIECES * x.var(axis=0, ddof=1), rel=1e-12)
    assert jackknife_variance(x, x) == pytest.approx(4 * alone, rel=1e-12)
    assert jackknife_variance(x, -x) == pytest.approx(2 * alone, rel=1e-12)


def test_windows_of_queries_with_contexts_of_their_own() -> None:
    value, queries = np.array([1.0, 2.0]), np.array([[1.01, 2.0], [0.99, 2.5], [1.0, 1.5]])
    near = np.array([0.1, 0.1])
    found = other_text(value, queries, near)
    half = stats.t.ppf(0.95, 2) * math.sqrt(2 / 3 * 2 * 0.01**2)
    assert found.high[0] - 1 == pytest.approx(half, rel=1e-12) == 1 - found.low[0]
    assert found.status.tolist() == [CONVERGED, NOT_CONVERGED]
    alone = other_text(value, queries[:1], near)
    assert not np.isfinite(alone.low).any()
    assert not np.isfinite(alone.high).any()
    assert alone.status.tolist() == [NOT_CONVERGED, NOT_CONVERGED]


@pytest.mark.parametrize("bias", [0.5, 0.585])
def test_coverage_of_a_number_with_a_known_limit(bias: float) -> None:
    """log of a mean of squares of N draws, biased by -2 / N^bias: 2,000 repeats cover 1 with 0.85
    to 0.97.

    The mean over draws of a piece is a normal variable, so that no pool need be drawn. A share of
    0.9 leaves this range with a probability below 1e-9.
    """
    rng, keys, repeats = np.random.default_rng(5), 4096, 2000
    covered = []
    for _ in range(repeats):
        pieces = 1 + rng.standard_normal(PIECES) * math.sqrt(2 / (keys / PIECES))
        mean = {size: pieces.reshape(-1, size).mean(axis=1) for size in (1, 2, 4, 8)}
        number = {
            size: np.log(mean[size]) + 1 - 2 / (keys * size / PIECES) ** bias for size in mean
        }
        without = np.log((pieces.sum() - pieces) / (PIECES - 1)) + 1 - 2 / keys**bias
        whole, half, quarter, eighth = (np.array([number[size].mean()]) for size in (8, 4, 2, 1))
        left_out = (without[:, None], 0 * without[:, None])
        sizes = (whole, half, quarter, eighth)
        found = extrapolate(whole, sizes, left_out, *ONE, np.array([True]))
        covered.append(found.low[0] <= 1 <= found.high[0])
    assert 0.85 < np.mean(covered) < 0.97
