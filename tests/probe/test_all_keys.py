"""A head key by key: on scores that a grid can hold it says what the grid says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from esscher.errors import grid as deposit
from esscher.probe import curves
from esscher.probe.curves import AllKeys, add_keys
from esscher.tails.scores import softmax_statistics, survival, tail_verdict


def held(size: float) -> AllKeys:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(rows, 7, generator=generator, dtype=torch.float64) for rows in (11, 900, 900)
    )
    return AllKeys(q, k, v, size)


def on_grid(pool: AllKeys) -> deposit.Deposit:
    state = deposit.init(11, deposit.choose_grid(torch.float64, "replacement"), pool.v.mean(0))
    return deposit.update(state, pool.scale * pool.q @ pool.k.T, pool.v)


def test_softmax_is_that_of_the_grid() -> None:
    pool = held(0.7)
    state = on_grid(pool)
    truth = softmax_statistics(state)
    found = pool.softmax()
    for name in ("effective_tokens", "entropy", "sd"):
        np.testing.assert_allclose(
            getattr(found, name), getattr(truth, name), rtol=1e-6, atol=1e-9, err_msg=name
        )


def test_the_shape_of_scores_does_not_know_their_size() -> None:
    """The same scores a million times as large, in blocks of queries of their own."""
    narrow, large = on_grid(held(3.0)), held(3e6).masses(deposit.Grid(1 / 8, 4, 1e-6))
    assert large.cells.shape[:2] == (2, 11)
    assert large.cells.shape[2] <= deposit.MAX_CELLS
    np.testing.assert_allclose(large.cells[-2].sum(1), 900, rtol=1e-12)
    shares = [survival(x).mean(0) for x in (narrow, large)]
    np.testing.assert_allclose(shares[1], shares[0], atol=3e-3)
    assert tail_verdict(shares[0], 900.0) == tail_verdict(shares[1], 900.0)


def test_few_scores_at_once_are_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = held(2.0).softmax()
    monkeypatch.setattr(curves, "ELEMENTS", 2000)
    parts, masses = held(2.0).softmax(), held(2e5).masses(deposit.Grid(1 / 8, 4, 1e-6))
    np.testing.assert_allclose(parts.entropy, whole.entropy, rtol=1e-12)
    np.testing.assert_allclose(masses.cells[-2].sum(1), 900, rtol=1e-12)


def test_a_pool_takes_over_where_the_grid_ends() -> None:
    pool = held(1.0)
    start = deposit.init(11, deposit.choose_grid(torch.float64, "replacement"), pool.v.mean(0))
    scores = pool.q @ pool.k.T
    assert isinstance(add_keys(start, scores, pool.v, pool), deposit.Deposit)
    for size in (1e3, 1e15):
        assert add_keys(start, size * scores, pool.v, pool) is pool
    assert add_keys(pool, scores, pool.v, None) is pool
