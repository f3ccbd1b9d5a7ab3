"""A head key by key: on scores that a grid can hold it says what the grid says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from esscher.errors import grid as deposit
from esscher.probe.curves import AllKeys, add_keys, no_keys
from esscher.probe.spec import ProbeSpec
from esscher.probe.statistic import HeadView
from esscher.tails.scores import score_statistics, tail_verdict
from tests.probe.views import view


def held(size: float) -> AllKeys:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(rows, 7, generator=generator, dtype=torch.float64) for rows in (11, 900, 900)
    )
    return AllKeys(size * q @ k.T, v)


def every(head: HeadView) -> tuple[Tensor, Tensor]:
    return head.scores, head.values


def on_grid(pool: AllKeys) -> deposit.Deposit:
    head = view(ProbeSpec(), pool.scores, pool.values)
    found = add_keys(no_keys(head, 11), head, every)
    assert isinstance(found, deposit.Deposit)
    return found


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
    for size in (1.0, 1e3, 1e15):
        pool = held(size)
        whole = view(ProbeSpec(), pool.scores, pool.values)
        block = view(ProbeSpec(), pool.scores[:, :450], pool.values[:450])
        start = no_keys(whole, 11)
        found = add_keys(start, replace(block, whole=whole), every)
        if size == 1.0:
            assert isinstance(found, deposit.Deposit)
            continue
        assert isinstance(found, AllKeys)
        assert torch.equal(found.scores, pool.scores)
        assert add_keys(found, block, every) is found
