"""Sums over a ranking against the softmax over each kept set by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import esscher.keep as keep
from esscher.errors.keep_curve import ranked_errors
from esscher.keep.context import Context
from esscher.keep.rule import ranking

COUNTS = [50, 5, 10, 250, 280]


def context(dtype: torch.dtype, positions: list[int] | None) -> Context:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(size, 16, generator=generator, dtype=torch.float64).to(dtype)
        for size in (8, 300, 300)
    )
    k[7] = k[8] = k[9]  # equal scores: the later key comes first
    return Context.of(3 * q, k, v + 50, positions=positions)


@pytest.mark.parametrize("positions", [None, list(range(285, 293))], ids=["all keys", "some keys"])
@pytest.mark.parametrize(
    "text", ["topk", "sinks:4+recent", "heavy", "strided:90+keynorm", "expected"]
)
@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=["float64", "float32"]
)
def test_each_set_by_itself(
    text: str, dtype: torch.dtype, within: float, positions: list[int] | None
) -> None:
    seen, rule = context(dtype, positions), keep.parse(text)
    free = rule.free
    assert isinstance(free, keep.Ranked)
    held = rule.start(seen, COUNTS)
    order, counts = ranking(free.order(seen)), torch.tensor(COUNTS)
    found = ranked_errors(seen, held, order, counts, held.sum(1))
    assert found.bias is not None
    for j, n in enumerate(COUNTS):
        kept = rule.include(seen, n).probability == 1
        assert int(kept.sum(1).max()) == n
        weight = torch.softmax(seen.scores.masked_fill(~kept, -torch.inf), 1)
        bias = (weight @ seen.near - seen.drift).numpy()
        size = np.linalg.norm(bias, axis=1)
        # the softmax over what is kept loses these 1e-11
        assert (np.linalg.norm(found.bias[:, j] - bias, axis=1) <= within * size + 1e-11).all()
        np.testing.assert_allclose(np.sqrt(found.mse[:, j]), size, rtol=within, atol=1e-11)
        np.testing.assert_allclose(found.sum_p2[:, j], weight.square().sum(1), rtol=within)


def test_equal_keys_are_ranked_from_the_last() -> None:
    height = torch.tensor([[2.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]])
    assert ranking(height).tolist() == [[3, 2, 0, 1], [3, 2, 1, 0]]
    assert ranking(height[0]).tolist() == [[3, 2, 0, 1]]


def test_queries_that_see_fewer_keys_than_n_keep_what_they_see() -> None:
    seen = context(torch.float64, [3, 299, 299, 299, 299, 299, 299, 299])
    none = torch.zeros_like(seen.visible)
    counts = torch.tensor([2, 40])
    found = ranked_errors(seen, none, ranking(seen.scores), counts, none.sum(1))
    assert found.mse[0, 1] < 1e-28
    assert found.mse[0, 0] > 1e-6


@pytest.mark.parametrize("apart", [300.0, 386.0, 600.0])
def test_what_is_kept_weighs_next_to_nothing(apart: float) -> None:
    """Squares of weights below 1e-154 of the whole are no numbers; relative to what is kept they
    are.
    """
    k = torch.tensor([[apart], [0.5], [0.0]], dtype=torch.float64)
    q, v = torch.ones(1, 1, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    seen = Context.of(q, k, v, scale=1.0)
    held = torch.zeros(1, 3, dtype=torch.bool)
    order, counts = torch.tensor([[2, 1, 0]]), torch.tensor([1, 2])
    found = ranked_errors(seen, held, order, counts, held.sum(1))
    second = torch.softmax(torch.tensor([0.0, 0.5], dtype=torch.float64), 0)
    np.testing.assert_allclose(found.sum_p2[0], [1.0, float(second.square().sum())], rtol=1e-12)
    np.testing.assert_allclose(found.mse[0, 0], 2.0, rtol=1e-12)
