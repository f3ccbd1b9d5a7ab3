"""The states of one head: parts merge to the whole, bytes give it back, what cannot go on
says so.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import esscher as es
from esscher.errors import grid as deposit
from esscher.probe import layer as head_state
from esscher.probe.layer import HeadState
from esscher.probe.statistics.base import Block, Start
from esscher.probe.statistics.registry import STATISTICS
from esscher.tails.scores import finish as finish_tail
from tests.errors.pools import by_subsets

QUERIES, KEPT, KEYS, WIDTH = 11, 5, 307, 3
COUNTS = np.array([1, 7, 50, 300])


def pool(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    scores = 1.5 * torch.randn(QUERIES, KEYS, generator=generator, dtype=torch.float64)
    values = torch.randn(KEYS, WIDTH, generator=generator, dtype=torch.float64) + 2.0
    return scores.to(dtype), values.to(dtype)


def state_of(keys: slice, dtype: torch.dtype = torch.float32, center: float = 2.0) -> HeadState:
    scores, values = pool(dtype)
    return head_state.update(begin(dtype, center), block(scores[:, keys], values[keys]))


def begin(dtype: torch.dtype = torch.float32, center: float = 0.0) -> HeadState:
    kept = head_state.kept_rows(QUERIES, KEPT)
    middle = torch.full((WIDTH,), center, dtype=torch.float64)
    return head_state.init(
        STATISTICS, Start(kept, torch.linspace(0, 1, QUERIES), KEYS, middle, dtype)
    )


def block(scores: torch.Tensor, values: torch.Tensor) -> Block:
    kept = head_state.kept_rows(QUERIES, KEPT)
    rows = torch.zeros(len(scores), 2), torch.zeros(len(values), 2)
    return Block(scores, *rows, values, torch.arange(len(values)), kept)


def assert_same(a: HeadState, b: HeadState, rtol: float) -> None:
    assert list(a.states) == list(b.states) == [statistic.name for statistic in STATISTICS]
    for sampling in ("replacement", "bernoulli"):
        left, right = (
            deposit.finish(head.states[sampling], COUNTS, sampling).mse for head in (a, b)
        )
        np.testing.assert_allclose(left, right, rtol=rtol)
        assert torch.equal(a.states[sampling].keys, b.states[sampling].keys)
    tails = [head.states["tail"] for head in (a, b)]
    np.testing.assert_allclose(*(finish_tail(tail).khat for tail in tails), rtol=1e-12)
    assert torch.equal(*(tail.count for tail in tails))
    assert torch.equal(*(head.states["identity"].keys for head in (a, b)))
    assert set(tails[0].count.tolist()) == set(a.states["identity"].keys.tolist())
    assert torch.equal(*(head.states["sinks"].mass for head in (a, b)))
    assert torch.equal(a.kept, b.kept)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 3e-5), (torch.float64, 1e-8)])
def test_errors_of_a_state_are_those_of_the_pool(dtype: torch.dtype, rtol: float) -> None:
    scores, values = pool(dtype)
    state = state_of(slice(None), dtype)
    for sampling, rows in (("replacement", range(QUERIES)), ("bernoulli", state.kept.tolist())):
        found = deposit.finish(state.states[sampling], COUNTS, sampling).mse
        q = scores[list(rows)].double()
        truth = es.exact_pool_curve(
            q,
            torch.eye(KEYS, dtype=torch.float64),
            values.double(),
            COUNTS,
            sampling=sampling,
            scale=1.0,
        )
        np.testing.assert_allclose(found, truth.queries.mse, rtol=rtol)


def test_parts_merge_to_the_whole_in_any_order_and_from_other_centres() -> None:
    whole = state_of(slice(None))
    a, b, c = (
        state_of(slice(0, 100)),
        state_of(slice(100, 101), center=-1.0),
        state_of(slice(101, None), center=5.0),
    )
    assert_same(head_state.merge(head_state.merge(a, b), c), whole, 1e-5)
    assert_same(head_state.merge(c, head_state.merge(b, a)), whole, 1e-5)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_bytes_give_the_state_back(dtype: torch.dtype, rtol: float) -> None:
    state = state_of(slice(None), dtype)
    data = head_state.to_bytes(state)
    again = head_state.from_bytes(data, STATISTICS)
    assert again.states["replacement"].grid == state.states["replacement"].grid
    assert again.states["replacement"].cells.dtype == torch.float64
    assert torch.equal(again.states["replacement"].first, state.states["replacement"].first)
    assert again.states["tail"].keep == state.states["tail"].keep
    assert_same(again, state, rtol)
    assert head_state.to_bytes(again) == data
    assert_same(
        head_state.merge(again, state_of(slice(0, 5), dtype)),
        head_state.merge(state, state_of(slice(0, 5), dtype)),
        rtol,
    )


def test_stacked_queries_over_their_own_keys_are_each_their_own_pool() -> None:
    scores, values = pool(torch.float64)
    center = values.mean(0)
    grid = deposit.choose_grid(torch.float64, "replacement")
    parts = [
        (slice(0, 4), slice(0, 90), 1.0),
        (slice(4, 5), slice(90, 290), 6.0),
        (slice(5, 11), slice(7, 30), 0.1),
    ]
    states = [
        deposit.update(
            deposit.init(len(scores[q]), grid, center + i), size * scores[q, k], values[k]
        )
        for i, (q, k, size) in enumerate(parts)
    ]
    found = deposit.finish(deposit.stack(states), COUNTS, "replacement").mse
    for rows, keys, size in parts:
        own = torch.eye(KEYS, dtype=torch.float64)[keys]
        truth = es.exact_pool_curve(size * scores[rows], own, values[keys], COUNTS, scale=1.0)
        np.testing.assert_allclose(found[rows], truth.queries.mse, rtol=1e-7)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-8)])
def test_stacked_queries_keep_one_fraction_of_their_own_keys(
    dtype: torch.dtype, rtol: float
) -> None:
    """All subsets of 3, 7 and 11 keys, f = n / 7; the pool of 7 keys alone has the same errors as
    among the others.
    """
    generator = torch.Generator().manual_seed(8)
    grid = deposit.choose_grid(dtype, "bernoulli")
    parts, pools = [], []
    for size in (3, 7, 11):
        scores = 2 * torch.randn(1, size, generator=generator, dtype=torch.float64)
        values = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
        pools.append((scores[0].numpy(), values.numpy()))
        parts.append(
            deposit.update(
                deposit.init(1, grid, values.mean(0)), scores.to(dtype), values.to(dtype)
            )
        )
    state = deposit.stack(parts)
    assert state.keys.tolist() == [3, 7, 11]
    assert state.mean_keys == 7
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
    alone = deposit.finish(parts[1], n, "bernoulli")
    np.testing.assert_allclose(alone.mse[0], found.mse[1], rtol=rtol)


@pytest.mark.parametrize(
    ("queries", "kept"), [(1, 1), (5, 9), (256, 64), (7, 2), (100, 99), (24, 8)]
)
def test_kept_rows_are_distinct_and_reach_both_ends(queries: int, kept: int) -> None:
    rows = head_state.kept_rows(queries, kept)
    assert len(set(rows.tolist())) == len(rows) == min(queries, kept)
    assert rows[0] == 0
    assert rows[-1] == (queries - 1 if kept > 1 else 0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["scores", "values"])
def test_what_is_not_finite_is_refused(bad: float, where: str) -> None:
    scores, values = pool()
    (scores if where == "scores" else values)[2, 1] = bad
    with pytest.raises(ValueError, match=r"not finite.*--dtype float32"):
        head_state.update(begin(), block(scores, values))


def test_scores_wider_than_the_grid_are_refused() -> None:
    scores, values = pool()
    scores[0, 0] = 9000.0
    with pytest.raises(ValueError, match="nats"):
        head_state.update(begin(), block(scores, values))
