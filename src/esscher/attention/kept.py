"""Softmax attention on the keys that a rule keeps, and on no others.

Where places alone decide (windows, first and last keys, given positions, one order for all
queries), a block of neighbouring queries asks its rule for the keys that any of them may keep, and
attends to these under the mask of what each one keeps. Where scores or chance decide, a block of
queries looks at all keys; memory stays flat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from esscher.attention.state import attend_block
from esscher.keep.context import Context
from esscher.keep.rule import PAIRS, Chance, Placed, PlacedOrder, Rule, Union, blocks, first_of
from esscher.keep.settled import settled

BLOCK = 192  # neighbouring queries with one set of keys

# rows of queries, keys that one of them keeps, which keys each keeps, and their weights
Block = tuple[Tensor, Tensor, Tensor, Tensor | None]


def attend_kept(
    q: Tensor, k: Tensor, v: Tensor, context: Context, rule: Rule, n: int | None, generator: Any
) -> Tensor:
    """(m, d_v): one head on the keys kept; ``context`` has q, k and v without their gradients."""
    chances = [part for part in rule.parts if isinstance(part, Chance)]
    if chances and not isinstance(generator, torch.Generator):
        names = ", ".join(part.name for part in chances)
        raise ValueError(
            f"generator: {names} keeps keys by chance; expected a torch.Generator, got"
            f" {generator!r}"
        )
    found, left = settled(rule, context, n)
    placed = [part for part in found.parts if isinstance(part, Placed)]
    if context.mask is None and len(placed) == len(found.parts):
        parts = _by_place(rule, placed, context.positions, left)
    else:
        parts = _by_score(found, context, left, generator)
    order, outs, blind = [], [], 0
    for rows, keys, mask, weight in parts:
        if len(keys) == 0:
            keys, mask, weight = keys.new_zeros(1), mask.new_zeros(len(rows), 1), None
        bias = mask if weight is None else weight.log().masked_fill(~mask, -torch.inf)
        out, lse = attend_block(q[rows], k[keys], v[keys], context.scale, bias)
        blind += int((lse == -torch.inf).sum())
        order.append(rows)
        outs.append(out)
    if blind:
        raise ValueError(
            f"keep: {blind} of {len(q)} queries keep no key, so attention is undefined there; "
            "add a part that keeps one surely, such as recent:1"
        )
    return torch.cat(outs)[torch.cat(order).argsort()]


def _by_score(rule: Rule, context: Context, n: int | None, generator: Any) -> Iterator[Block]:
    """Blocks of queries that look at all keys."""

    def uniform(*shape: int) -> Tensor:
        drawn = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)
        return drawn.to(context.k.device)

    chances = [part for part in rule.parts if isinstance(part, Chance)]
    shared = all(part.shared for part in chances)
    once = uniform(context.keys) if chances and shared else None
    for rows, seen in blocks(context):
        part = Union(
            tuple(one.take(rows) if isinstance(one, Chance) else one for one in rule.parts)
        )
        mask, weight = part.filled(seen, part.held(seen), n), None
        if chances:
            kept = part.decide(seen, mask, n)
            drawn = uniform(len(rows), context.keys) if once is None else once
            mask, weight = drawn < kept.probability, kept.weight
        keys = mask.any(0).nonzero()[:, 0]
        yield rows, keys, mask[:, keys], None if weight is None else weight[:, keys]


def _by_place(
    rule: Rule, parts: Sequence[Placed], positions: Tensor, n: int | None
) -> Iterator[Block]:
    """Blocks of queries in the order of their positions, with the keys that these may keep."""
    held = 0
    for near in torch.split(positions.argsort(stable=True), BLOCK):
        reach = torch.unique(torch.cat([part.reach(positions[near], n) for part in parts]))
        keys = reach[reach <= positions[near[-1]]]
        for rows in torch.split(near, max(1, PAIRS // max(1, len(keys)))):
            at = positions[rows][:, None]
            visible = keys <= at
            mask = torch.zeros_like(visible)
            for part in parts:
                if not isinstance(part, PlacedOrder) or part.is_local:
                    mask |= part.keeps(at, keys)
                elif part.size is not None:
                    mask |= first_of(part.rank(keys), visible, torch.full_like(rows, part.size))
            mask &= visible
            if n is not None:
                count = mask.sum(1)
                held += int(count.sum())
                for part in parts:
                    if isinstance(part, PlacedOrder) and part.is_open:
                        mask |= first_of(part.rank(keys), visible & ~mask, n - count)
            yield rows, keys, mask, None
    rule.check_least(n, held / len(positions))
