"""The states of one head: parts merge to the whole, bytes give it back, what cannot go on
says so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import esscher as es
from esscher.errors import grid as deposit
from esscher.probe.measure import (
    HeadState,
    LayerState,
    _joined,
    pack,
    unpack,
)
from esscher.probe.session import spread
from esscher.probe.spec import ProbeSpec
from esscher.probe.statistic import LayerMoments
from esscher.probe.statistics import STATISTICS
from esscher.tails.scores import finish as finish_tail
from tests.errors.pools import by_subsets
from tests.probe.views import INFO, view

QUERIES, KEPT, KEYS, WIDTH = 11, 5, 307, 3
COUNTS = np.array([1, 7, 50, 300])
SPEC = ProbeSpec(pool="corpus", kept_queries=KEPT)


def pool(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    scores = 1.5 * torch.randn(QUERIES, KEYS, generator=generator, dtype=torch.float64)
    values = torch.randn(KEYS, WIDTH, generator=generator, dtype=torch.float64) + 2.0
    return scores.to(dtype), values.to(dtype)


def state_of(keys: slice, dtype: torch.dtype = torch.float32, center: float = 2.0) -> HeadState:
    scores, values = pool(dtype)
    middle = torch.full((WIDTH,), center, dtype=torch.float64)
    return updated(scores[:, keys], values[keys], center=middle)


def updated(scores: torch.Tensor, values: torch.Tensor, **more: Any) -> HeadState:
    head = view(SPEC, scores, values, keys=KEYS, **more)
    states = {each.name: each.update(each.init(head), head) for each in STATISTICS}
    numbers = torch.arange(len(scores))
    return HeadState(states, {}, numbers, head.kept, torch.full_like(numbers, len(values)))


def merged(a: HeadState, b: HeadState) -> HeadState:
    found = _joined(a, b, STATISTICS)
    assert isinstance(found, HeadState)
    return found


def stored(state: HeadState) -> HeadState:
    """To bytes and back."""
    few = torch.zeros(1, 2, 3)
    moments = LayerMoments.of(few, few, None)
    data = pack(LayerState(INFO, moments, None, {0: state}))
    found = unpack(data, STATISTICS).heads[0]
    assert isinstance(found, HeadState)
    return found


def assert_same(a: HeadState, b: HeadState, rtol: float) -> None:
    left, right = (deposit.finish(head.states["draws"], COUNTS).mse for head in (a, b))
    np.testing.assert_allclose(left, right, rtol=rtol)
    assert torch.equal(a.states["draws"].keys, b.states["draws"].keys)
    tails = [head.states["tail"][1] for head in (a, b)]
    np.testing.assert_allclose(*(finish_tail(tail).khat for tail in tails), rtol=1e-12)
    assert torch.equal(*(tail.count for tail in tails))


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 3e-5), (torch.float64, 1e-8)])
def test_errors_of_a_state_are_those_of_the_pool(dtype: torch.dtype, rtol: float) -> None:
    scores, values = pool(dtype)
    state = state_of(slice(None), dtype)
    found = deposit.finish(state.states["draws"], COUNTS).mse
    truth = es.exact_pool_curve(
        scores.double(), torch.eye(KEYS, dtype=torch.float64), values.double(), COUNTS, scale=1.0
    )
    np.testing.assert_allclose(found, truth.queries.mse, rtol=rtol)


def test_parts_merge_to_the_whole_in_any_order_and_from_other_centres() -> None:
    whole = state_of(slice(None))

    def parts() -> list[HeadState]:
        cuts = ((slice(0, 100), 2.0), (slice(100, 101), -1.0), (slice(101, None), 5.0))
        return [state_of(cut, center=center) for cut, center in cuts]

    a, b, c = parts()
    assert_same(merged(merged(a, b), c), whole, 1e-5)
    a, b, c = parts()
    assert_same(merged(c, merged(b, a)), whole, 1e-5)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_bytes_give_the_state_back(dtype: torch.dtype, rtol: float) -> None:
    state = state_of(slice(None), dtype)
    again = stored(state)
    assert again.states["draws"].grid == state.states["draws"].grid
    assert again.states["draws"].cells.dtype == torch.float64
    assert torch.equal(again.states["draws"].first, state.states["draws"].first)
    assert again.states["tail"][1].keep == state.states["tail"][1].keep
    assert_same(again, state, rtol)


def test_queries_that_see_their_own_keys_are_each_their_own_pool() -> None:
    scores, values = pool(torch.float64)
    center = values.mean(0)
    grid = deposit.choose_grid(torch.float64, "replacement")
    parts = [
        (slice(0, 4), slice(0, 90), 1.0),
        (slice(4, 5), slice(90, 290), 6.0),
        (slice(5, 11), slice(7, 30), 0.1),
    ]
    seen = torch.full_like(scores, -torch.inf)
    for q, k, size in parts:
        seen[q, k] = size * scores[q, k]
    state = deposit.update(deposit.init(len(scores), grid, center), seen, values)
    found = deposit.finish(state, COUNTS, "replacement").mse
    for rows, keys, size in parts:
        own = torch.eye(KEYS, dtype=torch.float64)[keys]
        truth = es.exact_pool_curve(size * scores[rows], own, values[keys], COUNTS, scale=1.0)
        np.testing.assert_allclose(found[rows], truth.queries.mse, rtol=1e-7)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-8)])
def test_queries_keep_one_fraction_of_their_own_keys(dtype: torch.dtype, rtol: float) -> None:
    """All subsets of 3, 7 and 11 keys, f = n / 7; the pool of 7 keys alone has the same errors as
    among the others.
    """
    generator = torch.Generator().manual_seed(8)
    grid = deposit.choose_grid(dtype, "bernoulli")
    seen, pools = torch.full((3, 21), -torch.inf, dtype=torch.float64), []
    for row, (start, size) in enumerate([(0, 3), (3, 7), (10, 11)]):
        scores = 2 * torch.randn(1, size, generator=generator, dtype=torch.float64)
        values = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
        pools.append((scores[0].numpy(), values.numpy()))
        seen[row, start : start + size] = scores[0]

    def deposited(rows: slice, keys: slice) -> deposit.Deposit:
        values = torch.from_numpy(np.concatenate([own for _, own in pools])).to(dtype)
        start = deposit.init(len(seen[rows]), grid, values.mean(0))
        return deposit.update(start, seen[rows, keys].to(dtype), values[keys])

    state = deposited(slice(None), slice(None))
    assert state.keys.tolist() == [3, 7, 11]
    assert round(float(state.keys.double().mean())) == 7
    n = np.array([1, 3, 6, 7])
    found = deposit.finish(state, n, "bernoulli", details=True)
    for row, (scores_here, values_here) in enumerate(pools):
        for column, count in enumerate(n[:-1].tolist()):
            truth = by_subsets(scores_here, values_here, count / 7)
            np.testing.assert_allclose(found.mse[row, column], truth.mse, rtol=rtol)
            np.testing.assert_allclose(found.sum_p2[row, column], truth.sum_p2, rtol=rtol)
            assert found.bias is not None
            np.testing.assert_allclose(found.bias[row, column], truth.bias, rtol=0, atol=10 * rtol)
        weights = np.exp(scores_here - scores_here.max())
        np.testing.assert_allclose(
            found.sum_p2[row, -1], np.square(weights / weights.sum()).sum(), rtol=rtol
        )
    assert (found.mse[:, -1] == 0).all()
    alone = deposit.finish(deposited(slice(1, 2), slice(3, 10)), n, "bernoulli")
    np.testing.assert_allclose(alone.mse[0], found.mse[1], rtol=rtol)


@pytest.mark.parametrize(
    ("queries", "kept"), [(1, 1), (5, 9), (256, 64), (7, 2), (100, 99), (24, 8)]
)
def test_kept_queries_are_distinct_and_reach_both_ends(queries: int, kept: int) -> None:
    rows = spread(queries, kept)
    assert len(set(rows.tolist())) == len(rows) == min(queries, kept)
    assert rows[0] == 0
    assert rows[-1] == (queries - 1 if kept > 1 else 0)


def test_scores_wider_than_the_grid_are_refused_where_keys_are_not_held() -> None:
    scores, values = pool()
    scores[0, 0] = 9000.0
    with pytest.raises(ValueError, match="nats"):
        updated(scores, values)
