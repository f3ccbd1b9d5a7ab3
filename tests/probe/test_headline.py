"""The numbers of a head that compare between pools: fitted and told at n that are the same for all
of them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import esscher as es
from esscher.errors.curve import ErrorCurve
from esscher.probe.curves import fitted, headline, headline_numbers, read_numbers
from esscher.probe.spec import COMPARED, FIXED, ProbeSpec, drawn_ladder, fit_points, fit_range
from esscher.probe.statistics.errors import Draws

HALVES = [64, 91, 128, 181, 256, 362, 512, 724, 1024, 1448, 2048, 2896, 4096]


def pool_curve(ladder: np.ndarray, keys: int = 300) -> ErrorCurve:
    """Five queries of a bent curve: scores of deviation 2."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (
        torch.randn(rows, 3, generator=generator, dtype=torch.float64) for rows in (5, keys, keys)
    )
    return es.exact_pool_curve(2 * q, k, v, ladder)


@pytest.mark.parametrize(
    ("given", "keys"),
    [(None, 1), (None, 40), (None, 300), (None, 5000), ((10, 100), 300), ((70,), 77)],
)
def test_no_number_depends_on_the_ladder_of_the_pool(given: Any, keys: int) -> None:
    """Of one law the numbers are the same to rounding, whatever size of pool or n the ladder was
    made for.
    """
    spec = ProbeSpec(n=given)
    ladder = drawn_ladder(spec, keys)
    assert {*HALVES, *FIXED, keys, 1024 * keys} <= set(ladder.tolist())
    found = headline(pool_curve(ladder), spec, keys)
    curve = pool_curve(np.array([1, *HALVES, 10**6]))
    x, y = np.log(HALVES), np.log(curve.rms[1:-1])
    assert found["beta_fit"] == pytest.approx(-np.polyfit(x, y, 1)[0], rel=1e-9)
    windows = np.array([0, 0, 1, 1, 2])
    again = es.fit_rate(
        replace(curve, queries=replace(curve.queries, clusters=windows)), window=(64, 4096)
    )
    clustered = fitted(pool_curve(ladder), fit_range(spec, 300), windows)
    assert (clustered["beta_low"], clustered["beta_high"]) == pytest.approx(
        again.interval, rel=1e-9
    )
    one = pool_curve(np.array([COMPARED]))
    assert found[f"relative_{COMPARED}"] == pytest.approx(one.rms[0] / one.scale, rel=1e-9)
    assert found[f"effective_{COMPARED}"] == pytest.approx(one.effective_tokens[0], rel=1e-9)


def test_tokens_needed_are_those_of_the_curve() -> None:
    spec = ProbeSpec(epsilons=(0.2, 1e-3))
    curve = pool_curve(drawn_ladder(spec, 300))
    found = headline(curve, spec, 300)
    assert found["tokens_needed_20pct"] == es.tokens_needed(curve, 0.2)
    assert math.isnan(found["tokens_needed_0_1pct"])  # not reached within the ladder
    low, high = (fitted(curve, fit_range(spec, 300))[key] for key in ("beta_low", "beta_high"))
    # the range of local slopes, where windows are not told
    assert curve.slope is not None
    inside = -curve.slope[(curve.n >= 64) & (curve.n <= 4096)]
    assert low == pytest.approx(inside.min(), abs=1e-9)
    assert high == pytest.approx(inside.max(), abs=1e-9)


def test_numbers_of_many_curves_are_those_of_each() -> None:
    """Read at once for weighted means over the queries; between the n of the ladder by straight
    lines, to 1 %.
    """
    spec = ProbeSpec()
    ladder = drawn_ladder(spec, 300)
    curve = pool_curve(ladder)
    of_each = curve.queries
    limit = np.square(of_each.limit).sum(axis=1)
    weights = np.array([[1.0, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
    weights /= weights.sum(axis=1, keepdims=True)
    read = read_numbers(
        spec, 300, ladder, weights @ of_each.mse, weights @ limit, weights @ of_each.sum_p2
    )
    for row, share in zip(read, weights, strict=True):
        rows = np.flatnonzero(share)
        few = replace(of_each.take(rows), dmse_dlogn=None)
        known = headline(ErrorCurve.from_queries(ladder, few, kind="exact", origin=""), spec, 300)
        for number, value in zip(headline_numbers(spec), row, strict=True):
            near = 1e-2 if number.n is None else 1e-9
            assert number.plain(value) == pytest.approx(known[number.key], rel=near), number.key


def test_a_curve_that_does_not_come_down_needs_no_number_of_tokens() -> None:
    spec = ProbeSpec(epsilons=(0.1,))
    ladder = drawn_ladder(spec, 300)
    flat = np.ones((1, ladder.size))
    names = [number.key for number in headline_numbers(spec)]
    read = dict(zip(names, read_numbers(spec, 300, ladder, flat, np.ones(1), flat)[0], strict=True))
    assert math.isnan(read["tokens_needed_10pct"])
    assert read["beta_fit"] == pytest.approx(0, abs=1e-12)
    low = read_numbers(spec, 300, ladder, 1e-9 * flat, np.ones(1), flat)[0]
    assert low[2] == pytest.approx(math.log(ladder[0]))  # small from the first n on


def test_another_range_is_another_exponent() -> None:
    spec = ProbeSpec(fit=(8, 64))
    ladder = drawn_ladder(spec, 300)
    found = fitted(pool_curve(ladder), fit_range(spec, 300))
    points = np.array([8, 11, 16, 23, 32, 45, 64])
    assert fit_points(fit_range(spec, 300)).tolist() == points.tolist()
    y = np.log(pool_curve(points).rms)
    assert found["beta_fit"] == pytest.approx(-np.polyfit(np.log(points), y, 1)[0], rel=1e-9)


def test_the_largest_n_is_fitted_to_where_it_is_no_half_octave() -> None:
    assert fit_points((100, 1000)).tolist() == [100, 141, 200, 283, 400, 566, 800, 1000]
    assert fit_points((1, 4)).tolist() == [1, 2, 3, 4]
    assert fit_points(fit_range(ProbeSpec(), 300)).tolist() == HALVES


@pytest.mark.parametrize(
    "given", [(4096, 64), (64, 64), (0, 64), (64, 91), (64.5, 100), (64,), "64:4096", True]
)
def test_a_range_that_cannot_be_fitted_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="fit"):
        ProbeSpec(fit=given)
    assert ProbeSpec(fit=[16, 128]).fit == (16, 128)


@pytest.mark.parametrize(
    ("keys", "ends"),
    [(2048, (16, 256)), (1270, (16, 158)), (318, (16, 39)), (100, (6, 12)), (16, (2, 4))],
)
def test_in_own_contexts_the_range_ends_at_an_eighth_of_the_keys(
    keys: int, ends: tuple[int, int]
) -> None:
    """Beyond, draws with replacement meet keys again: an error that falls there says nothing of the
    head.
    """
    spec = ProbeSpec(pool="sequence")
    assert fit_range(spec, keys) == ends
    points = fit_points(ends)
    assert points.size >= 3
    assert set(points) <= set(drawn_ladder(spec, keys))
    curve = pool_curve(drawn_ladder(spec, keys))
    y = np.log(pool_curve(points).rms)
    slope = -np.polyfit(np.log(points), y, 1)[0]
    assert headline(curve, spec, keys)["beta_fit"] == pytest.approx(slope, rel=1e-9)
    for given in (ProbeSpec(pool="sequence", fit=(64, 4096)), ProbeSpec(pool="corpus")):
        assert fit_range(given, keys) == (64, 4096)


def test_help_says_the_range_and_what_is_drawn() -> None:
    own = {column.key: column for column in Draws().columns(ProbeSpec(pool="sequence"))}
    assert "16 drawn keys to an eighth of those that a query sees" in own["beta_fit"].help
    assert "draws with replacement from the keys a query sees" in own["tokens_needed_10pct"].help
    corpus = {c.key: c for c in Draws().columns(ProbeSpec(fit=(32, 1024), pool="corpus"))}
    assert "from 32 to 1,024 drawn keys" in corpus["beta_fit"].help
    assert "replacement from the pool" in corpus["tokens_needed_10pct"].help
