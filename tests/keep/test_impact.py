"""Impact: what the loss of a key changes behind W_O, by dropping it; and means over neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import esscher.keep as keep
from esscher.keep.ranked import pooled

HEADS, QUERIES, KEYS, WIDTH, OUT = 2, 3, 11, 4, 5


def context(sharp: float) -> keep.Context:
    """Queries of two heads below each other, each with a W_O of its own."""
    g = torch.Generator().manual_seed(4)
    q = torch.randn(HEADS * QUERIES, 4, generator=g, dtype=torch.float64)
    k, v = (
        torch.randn(KEYS, 4, generator=g, dtype=torch.float64),
        torch.randn(KEYS, WIDTH, generator=g, dtype=torch.float64),
    )
    made = keep.Context.of(sharp * q, k, v, positions=[8, 9, 10] * HEADS)
    output = torch.randn(HEADS, WIDTH, OUT, generator=g, dtype=torch.float64)
    return replace(made, heads=torch.arange(HEADS).repeat_interleave(QUERIES), output=output)


def changes(seen: keep.Context) -> torch.Tensor:
    """|W_O (output without key j - output)| of every query and key, by leaving the key out."""
    assert seen.output is not None
    rows = []
    for i in range(len(seen.q)):
        into, full = seen.output[i // QUERIES], seen.attention[i] @ seen.v
        row = []
        for j in range(KEYS):
            scores = seen.scores[i].clone()
            scores[j] = -torch.inf
            row.append(((scores.softmax(0) @ seen.v - full) @ into).norm())
        rows.append(torch.stack(row))
    return torch.stack(rows)


def test_the_order_is_the_root_mean_square_change_of_the_stream() -> None:
    for sharp in (0.5, 6.0):
        seen = context(sharp)
        wanted = changes(seen)
        torch.testing.assert_close(keep.Impact().order(seen), wanted.square().mean(0).sqrt())
        last = wanted.view(HEADS, QUERIES, KEYS)[:, -2:].flatten(0, 1)
        torch.testing.assert_close(keep.Impact(last=2).order(seen), last.square().mean(0).sqrt())
    assert bool((context(6.0).attention > 0.5).any())  # both cases were there
    assert bool((context(0.5).attention < 0.5).all())


def test_without_an_output_map_values_are_compared_as_they_are() -> None:
    seen = replace(context(0.5), output=None)
    pi = seen.attention
    wanted = (pi / (1 - pi) * seen.distance).square().mean(0).sqrt()
    torch.testing.assert_close(keep.Impact().order(seen), wanted)


@pytest.mark.parametrize("pool", [1, 2, 3, 5])
def test_neighbours_count_with_their_mean(pool: int) -> None:
    order = torch.rand(KEYS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    before, after = (pool - 1) // 2, pool // 2
    wanted = [order[max(0, j - before) : j + after + 1].mean() for j in range(KEYS)]
    torch.testing.assert_close(pooled(order, pool), torch.stack(wanted))
    torch.testing.assert_close(
        keep.Heavy(pool=pool).order(context(1.0)), pooled(keep.Heavy().order(context(1.0)), pool)
    )
    alone = keep.Impact().order(context(1.0))
    torch.testing.assert_close(
        keep.Impact(pool=pool).order(context(1.0)), torch.maximum(alone, pooled(alone, pool))
    )
