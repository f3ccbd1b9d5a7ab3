"""A head key by key: on scores that a grid can hold it says what the grid says."""

from __future__ import annotations

import numpy as np
import torch

from esscher.errors import grid as deposit
from esscher.probe.curves import AllKeys, add_keys
from esscher.tails.scores import score_statistics, tail_verdict


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
    truth, found = score_statistics(on_grid(pool)), pool.statistics()
    for name in ("effective", "sd"):
        np.testing.assert_allclose(found[name], truth[name], rtol=1e-6, atol=1e-9, err_msg=name)


def test_the_shape_of_scores_does_not_know_their_size() -> None:
    """The same scores a million times as large."""
    found = (score_statistics(on_grid(held(3.0))), held(3e6).statistics())
    shares = [each["survival"].mean(0) for each in found]
    np.testing.assert_allclose(shares[1], shares[0], atol=3e-3)
    assert tail_verdict(shares[0], 900.0) == tail_verdict(shares[1], 900.0)


def test_a_pool_takes_over_where_the_grid_ends() -> None:
    pool = held(1.0)
    start = deposit.init(11, deposit.choose_grid(torch.float64, "replacement"), pool.v.mean(0))
    scores = pool.q @ pool.k.T
    assert isinstance(add_keys(start, scores, pool.v, pool), deposit.Deposit)
    for size in (1e3, 1e15):
        assert add_keys(start, size * scores, pool.v, pool) is pool
    assert add_keys(pool, scores, pool.v, None) is pool
