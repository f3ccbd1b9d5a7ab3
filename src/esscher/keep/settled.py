"""A rule with all that decided which it decides for all queries together, so that a few of them at
a time can go on alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from esscher.keep.context import Context
from esscher.keep.rule import (
    Chance,
    Part,
    Placed,
    PlacedOrder,
    Ranked,
    Rule,
    Union,
    blocks,
    ranking,
)


@dataclass(frozen=True, eq=False)
class _Ordered(PlacedOrder):
    """The order of a ranked part, once its context is known: ``given`` (N,), all different."""

    name: ClassVar[str] = "ordered"
    label: str
    given: Tensor = field(repr=False)
    size: int | None

    def rank(self, keys: Tensor) -> Tensor:
        return self.given[keys]

    def reach(self, positions: Tensor, n: int | None) -> Tensor:
        """The first in the order up to the first query, and all later keys: a key can only push
        others out.
        """
        first, last = int(positions[0]), int(positions[-1])
        size = min(self.size or n or 0, first + 1)
        found = self.given[: first + 1].topk(size).indices
        return torch.cat([found, torch.arange(first + 1, last + 1, device=positions.device)])

    def text(self) -> str:
        return self.label


def settled(rule: Rule, context: Context, n: int | None) -> tuple[Rule, int | None]:
    """The rule, and n where it still leaves a number open; pairs of queries and keys are open in
    blocks only.

    Where places alone decide, no pair is looked at, and whether n is too small is left to whoever
    counts what they hold.
    """
    rule.check(context, n)
    ordered = Union(tuple(_ordered(part, context) for part in rule.parts))
    if n is not None and not (
        context.mask is None and all(isinstance(part, Placed) for part in ordered.parts)
    ):
        held = sum(int(ordered.held(part).sum()) for _, part in blocks(context))
        rule.check_least(n, held / len(context.q))
    chance = {
        part: part.settle(_seen(ordered, context, n, part.is_open))
        for part in ordered.parts
        if isinstance(part, Chance)
    }
    found = Union(
        tuple(chance[part] if isinstance(part, Chance) else part for part in ordered.parts)
    )
    return found, n if found.free else None


def _ordered(part: Part, context: Context) -> Part:
    if not isinstance(part, Ranked) or isinstance(part, Placed) or part.per_query:
        return part
    order = part.order(context)
    if order.ndim == 2:
        return part
    given = torch.empty_like(order, dtype=torch.int64)
    given[ranking(order)[0]] = -torch.arange(len(order), device=order.device)
    return _Ordered(part.text(), given, part.size)


def _seen(
    rule: Rule, context: Context, n: int | None, is_open: bool
) -> Iterator[tuple[Context, Tensor, Tensor | None]]:
    for _, part in blocks(context):
        sure = rule.filled(part, rule.held(part), n)
        yield (
            part,
            part.visible & ~sure,
            n - sure.sum(1).double() if is_open and n is not None else None,
        )
