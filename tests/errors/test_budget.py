"""Tokens needed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import esscher as es
from esscher.errors.budget import Sharing, tokens_needed
from esscher.errors.curve import ErrorCurve


def power_law(beta: float, n: list[int], scale: float = 1.0, slope: bool = True) -> ErrorCurve:
    counts = np.array(n)
    slopes = np.full(counts.size, -beta) if slope else None
    return ErrorCurve(
        n=counts, rms=counts**-beta, kind="exact", scale=scale, slope=slopes, delta=1.0
    )


@pytest.mark.parametrize("slope", [True, False])
def test_power_law_is_inverted_exactly(slope: bool) -> None:
    curve = power_law(0.25, [10, 100, 10**4, 10**8], slope=slope)
    assert es.tokens_needed(curve, 0.1) == 10**4
    assert es.tokens_needed(curve, 0.0999) == math.ceil(0.0999**-4)
    assert es.tokens_needed(curve, 5.0) == 10


def test_is_the_smallest_n_of_a_real_head() -> None:
    """The interpolated answer and its neighbours are checked by evaluating the exact curve
    there.
    """
    law = es.Gaussian(torch.eye(3).double())
    head = es.Head(1.3 * torch.eye(3).double(), torch.eye(3).double())
    x = law.sample(50, torch.Generator().manual_seed(0))
    curve = es.exact_curve(head, law, x, np.unique(np.geomspace(1, 10**9, 37).round()))
    for epsilon in (0.9, 0.5, 0.3):
        n = es.tokens_needed(curve, epsilon)
        around = es.exact_curve(
            head, law, x, [max(1, int(0.99 * n)), n, int(1.01 * n) + 1]
        ).relative
        assert around[2] <= epsilon * (1 + 1e-3)
        assert around[0] >= epsilon * (1 - 1e-3)


def test_never_reached_says_so_with_the_error_at_the_largest_n() -> None:
    with pytest.raises(ValueError, match=r"not reached; it is 0\.1 at the largest n = 10,000"):
        es.tokens_needed(power_law(0.25, [10, 10**4]), 0.01)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan"), "small"])
def test_bad_epsilon(epsilon: object) -> None:
    with pytest.raises(ValueError, match="epsilon: expected"):
        es.tokens_needed(power_law(0.5, [1, 10]), epsilon)


def test_a_limit_of_size_zero_has_no_relative_error() -> None:
    with pytest.raises(ValueError, match=r"compare curve\.rms"):
        es.tokens_needed(power_law(0.5, [1, 10], scale=0.0), 0.1)


def test_frame_is_tidy() -> None:
    frame = power_law(0.5, [1, 100]).to_frame()
    assert list(frame.columns) == ["metric", "kind", "n", "rms", "relative", "stderr", "q95"]
    assert frame["stderr"].tolist() == [0.0, 0.0]
    assert frame["rms"].tolist() == [1.0, 0.1]


def curve_of(n: list[int], rms: list[float], **fields: Any) -> ErrorCurve:
    return ErrorCurve(
        n=np.array(n),
        rms=np.array(rms, dtype=float),
        kind="exact",
        **({"scale": 1.0, "delta": 1.0} | fields),
    )


def test_the_order_of_n_and_an_n_given_twice_change_nothing() -> None:
    n, rms = [1, 4, 16, 64], [1.0, 0.5, 0.25, 0.125]
    shuffled = curve_of([64, 4, 1, 16, 4], [0.125, 0.5, 1.0, 0.25, 0.5])
    for given in (curve_of(n, rms), shuffled):
        assert (tokens_needed(given, 0.5), tokens_needed(given, 0.3)) == (4, 12)


def test_errors_of_zero_flat_and_single_points() -> None:
    """No logarithm of 0 anywhere: warnings are errors here."""
    nothing = curve_of([1, 10, 100], [0.0, 0.0, 0.0], delta=0.0, scale=0.0)
    assert nothing.relative.tolist() == [0.0, 0.0, 0.0]
    assert tokens_needed(nothing, 0.1) == 1
    assert curve_of([1, 2], [0.5, 0.0], scale=0.0).relative.tolist() == [np.inf, 0.0]
    assert tokens_needed(curve_of([7], [0.2]), 0.2) == 7
    assert tokens_needed(curve_of([1, 10, 100], [0.3] * 3, slope=np.zeros(3)), 0.3) == 1
    for flat in (curve_of([7], [0.2]), curve_of([1, 7], [0.2, 0.2])):
        with pytest.raises(ValueError, match="not reached"):
            tokens_needed(flat, 0.1)
    ends = curve_of([1, 10, 100, 200], [0.6, 0.3, 0.0, 0.0])
    assert 10 < tokens_needed(ends, 0.1) < tokens_needed(ends, 1e-6) == 100
    assert (
        tokens_needed(curve_of([1, 2**53], [1.0, 2**-26.5], slope=np.full(2, -0.5)), 2**-26.5)
        <= 2**53
    )


@pytest.mark.parametrize("bad", [[0.5, float("nan")], [float("inf"), 0.5], [0.5, -0.1]])
def test_errors_that_are_no_curve_are_refused(bad: list[float]) -> None:
    for ask in (lambda c: tokens_needed(c, 0.1), lambda c: Sharing([c])):
        with pytest.raises(ValueError, match="expected finite errors of at least 0"):
            ask(curve_of([1, 10], bad))


def test_curves_with_gaps_are_refused() -> None:
    with pytest.raises(ValueError, match="above 0 at a larger n"):
        tokens_needed(curve_of([1, 5, 10], [0.5, 0.0, 0.2]), 0.1)
    with pytest.raises(ValueError, match="at least one n"):
        tokens_needed(ErrorCurve(np.zeros(0, dtype=np.int64), np.zeros(0), "exact"), 0.1)


def test_repeats_without_error_have_no_standard_error() -> None:
    assert ErrorCurve.from_repeats(np.array([1, 2]), np.zeros((3, 2))).stderr.tolist() == [0.0, 0.0]
