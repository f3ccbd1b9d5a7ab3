"""Tokens shared between heads: against every possible split, and known optima of power laws."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from esscher.errors import ErrorCurve, exact_pool_curve
from esscher.errors.budget import Sharing, log_rms, tokens_needed


def power_law(constant: float, exponent: float, n: np.ndarray) -> ErrorCurve:
    return ErrorCurve(n=n, rms=constant * n.astype(float) ** -exponent, kind="exact", scale=1.0)


def test_it_is_the_best_of_all_splits_of_convex_curves() -> None:
    n = np.arange(1, 25)
    curves = [power_law(1.0, 0.5, n), power_law(3.0, 0.5, n), power_law(0.5, 0.2, n)]
    total = 40
    sharing = Sharing(curves)
    found = sharing.best(total)
    errors = [curve.rms**2 for curve in curves]
    best = min(
        sum(error[count - 1] for error, count in zip(errors, split, strict=True))
        for split in itertools.product(range(1, 25), repeat=3)
        if sum(split) == total
    )
    assert int(found.sum()) == total
    assert sharing.squared_error(found) == pytest.approx(best, rel=1e-9)
    assert sharing.squared_error(found) < sharing.squared_error(sharing.uniform(total))


def test_square_roots_share_in_proportion_to_their_constants() -> None:
    """Minimising sum c_i^2/n_i gives n_i proportional to c_i."""
    n = np.unique(np.geomspace(1, 1e6, 200).astype(int))
    constants = np.array([1.0, 2.0, 5.0])
    sharing = Sharing([power_law(float(c), 0.5, n) for c in constants])
    found = sharing.best(80_000)
    assert found / 80_000 == pytest.approx(constants / constants.sum(), rel=0.02)
    uniform = sharing.squared_error(sharing.uniform(80_000))
    assert sharing.squared_error(found) / uniform == pytest.approx(
        constants.sum() ** 2 / (3 * (constants**2).sum()), rel=1e-3
    )


def test_a_curve_that_is_not_convex_is_split_near_the_best() -> None:
    """A frozen head: flat, then falling; against a brute-force search."""
    n = np.arange(1, 41)
    frozen = ErrorCurve(n=n, rms=np.where(n < 20, 1.0, 1.0 * 20.0 / n), kind="exact", scale=1.0)
    plain = power_law(1.0, 0.5, n)
    for total in (10, 25, 45, 70):
        sharing = Sharing([frozen, plain])
        found = sharing.squared_error(sharing.best(total))
        splits = [(a, total - a) for a in range(1, 41) if 1 <= total - a <= 40]
        best = min(frozen.rms[a - 1] ** 2 + plain.rms[b - 1] ** 2 for a, b in splits)
        assert best <= found * (1 + 1e-9)
        assert found <= 1.35 * best


def test_the_uniform_split_gives_everyone_the_same_share_within_its_ends() -> None:
    """69 of 208 are a third: 2 of 8, 33 or 34 of 100. A curve that starts at 6 has at least 6."""
    short, long = (
        power_law(1.0, 0.5, np.array([1, 4, 8])),
        power_law(1.0, 0.5, np.array([1, 50, 100])),
    )
    assert Sharing([short, long, long]).uniform(69).tolist() == [2, 34, 33]
    late = power_law(1.0, 0.5, np.array([6, 8]))
    assert Sharing([late, long, long]).uniform(69).tolist() == [6, 32, 31]


def test_kept_keys_are_interpolated_to_the_exact_curve_up_to_all_of_them() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(rows, 8, generator=generator, dtype=torch.float64) for rows in (5, 64, 64)
    )
    coarse = exact_pool_curve(q, k, v, [4, 8, 16, 32, 48, 64], "bernoulli")
    fine = exact_pool_curve(q, k, v, [5, 11, 24, 40, 56, 60, 63], "bernoulli")
    assert np.exp(log_rms(coarse)(np.log(fine.n))) == pytest.approx(fine.rms, rel=0.01)
    assert np.exp(log_rms(coarse)(np.log(np.array([64.0])))) == pytest.approx(0.0)
    needed = tokens_needed(coarse, 0.5)
    at, before = exact_pool_curve(q, k, v, [needed + 1, needed - 1], "bernoulli").relative
    assert at <= 0.5 <= before


def test_random_curves_are_shared_in_whole_numbers_with_finite_errors() -> None:
    """Single points, flat curves, errors of 0 at the end and throughout, 400 times: never worse
    than the uniform split.
    """
    pick = np.random.default_rng(0)
    for _ in range(400):
        curves = []
        for _ in range(int(pick.integers(1, 4))):
            points = int(pick.integers(1, 4))
            n = np.sort(pick.choice([1, 2, 3, 5, 10, 100, 1000, 10**6], points, replace=False))
            rms = (
                np.full(points, pick.uniform())
                if pick.random() < 0.3
                else pick.uniform(size=points)
            )
            rms[-1] *= pick.random() > 0.2
            rms *= pick.random() > 0.1
            curves.append(ErrorCurve(n=n, rms=rms, kind="exact", scale=1.0))
        low, high = (sum(int(curve.n[end]) for curve in curves) for end in (0, -1))
        total = int(pick.integers(low, high + 1))
        sharing = Sharing(curves)
        best, uniform = sharing.best(total), sharing.uniform(total)
        assert best.sum() == uniform.sum() == total
        assert 0 <= sharing.squared_error(best) <= sharing.squared_error(uniform) < np.inf
        for tokens in (best, uniform):
            assert all(
                curve.n[0] <= count <= curve.n[-1]
                for curve, count in zip(curves, tokens, strict=True)
            )
