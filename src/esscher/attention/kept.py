"""Softmax attention on the keys that a rule keeps, and on no others.

Where positions alone decide (windows, first and last keys, given positions), a block of
neighbouring queries looks only at the keys that one of them may keep. Otherwise a block of queries
looks at all keys; memory stays flat.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from esscher.attention.state import attend_block
from esscher.keep.context import Context
from esscher.keep.rule import Chance, Part, Ranked, Rule, Union, blocks

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
    rule.check(context, n)
    by_position = all(part.near(0, 0) is not None for part in rule.parts)
    if by_position and context.mask is None:
        found = _by_position(rule, context.positions)
    else:
        found = _by_score(*precomputed(rule, context, n), context, generator)
    order, outs, blind = [], [], 0
    for rows, keys, mask, weight in found:
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


def _by_position(rule: Rule, positions: Tensor) -> Iterator[Block]:
    """Blocks of queries in the order of their positions, with the keys that these may keep."""
    for rows in torch.split(positions.argsort(stable=True), BLOCK):
        at = positions[rows][:, None]
        near = [part.near(int(at[0]), int(at[-1])) for part in rule.parts]
        keys = torch.unique(torch.cat([keys for keys in near if keys is not None]))
        keys = keys.to(at.device)
        mask = torch.zeros(len(rows), len(keys), dtype=torch.bool, device=at.device)
        for part in rule.parts:
            mask |= part.keeps(at, keys)
        yield rows, keys, mask & (keys <= at), None


def _by_score(rule: Rule, n: int | None, context: Context, generator: Any) -> Iterator[Block]:
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


@dataclass(frozen=True, eq=False)
class _GivenOrder(Ranked):
    """A ranking whose order of the keys (N,) was computed from all queries."""

    name: ClassVar[str] = "order"
    given: Tensor = field(repr=False)
    size: int | None

    def order(self, context: Context) -> Tensor:
        return self.given


def precomputed(rule: Rule, context: Context, n: int | None) -> tuple[Rule, int | None]:
    """The rule with the numbers that it finds from all queries together, so that blocks of queries
    can follow it one by one, and n where the rule still leaves a number open.
    """

    def ordered(part: Part) -> Part:
        if not isinstance(part, Ranked) or part.per_query or part.near(0, 0) is not None:
            return part
        order = part.order(context)
        return part if order.ndim == 2 else _GivenOrder(order, part.size)

    def seen(is_open: bool) -> Iterator[tuple[Context, Tensor, Tensor | None]]:
        """What the chance of a key depends on, for blocks of queries."""
        for _, block in blocks(context):
            sure = ranked.filled(block, ranked.held(block), n)
            wanted = n - sure.sum(1).double() if is_open and n is not None else None
            yield block, block.visible & ~sure, wanted

    ranked = Union(tuple(ordered(part) for part in rule.parts))
    if n is not None:
        held = sum(int(ranked.held(block).sum()) for _, block in blocks(context))
        rule.check_least(n, held / len(context.q))
    found = Union(
        tuple(
            part.precomputed(seen(part.is_open)) if isinstance(part, Chance) else part
            for part in ranked.parts
        )
    )
    return found, n if found.free else None
