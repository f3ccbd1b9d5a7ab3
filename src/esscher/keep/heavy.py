"""Heavy: the keys to which the queries of a key-value head attend most, one set for all of them
(H2O, SnapKV).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esscher.keep.blocks import blocks
from esscher.keep.context import Context
from esscher.keep.rule import Ranked
from esscher.keep.sizes import as_size

__all__ = ["Heavy", "observed", "pooled"]


@dataclass(frozen=True)
class Heavy(Ranked):
    """The ``size`` keys of largest mean softmax weight over the choosing queries at the ``last``
    positions, or over all of them.

    Queries that stand all at one place are counted in the order of their rows. ``pool``: the mean
    weight of so many neighbours counts for a key (SnapKV).
    """

    name: ClassVar[str] = "heavy"
    size: int | None = None
    last: int | None = None
    pool: int | None = None

    def __post_init__(self) -> None:
        as_size(self.size, "heavy")
        as_size(self.last, "heavy, last")
        as_size(self.pool, "heavy, pool")

    @property
    def observes(self) -> bool:
        return True

    def order(self, context: Context) -> Tensor:
        context = context.choosing
        asked = observed(context, self.last)
        total = torch.zeros(context.keys, dtype=torch.float64, device=context.k.device)
        for rows, part in blocks(context):
            total += part.attention[asked[rows]].sum(0)
        return pooled(total / asked.sum(), self.pool)


def observed(context: Context, last: int | None) -> Tensor:
    """Queries (m,) at the last positions; where all stand at one place, the last rows."""
    places = torch.unique(context.positions)
    if last is None:
        return torch.ones_like(context.positions, dtype=torch.bool)
    if len(places) == 1:
        rows = torch.arange(len(context.positions), device=places.device)
        return rows >= len(rows) - last
    return torch.ge(context.positions, places[-min(last, len(places))])


def pooled(order: Tensor, pool: int | None) -> Tensor:
    """Of each key the mean over ``pool`` neighbours, itself in the middle; fewer at the ends."""
    if pool is None or pool == 1:
        return order
    before, after = (pool - 1) // 2, pool // 2
    along = torch.nn.functional.pad(order.cumsum(0), (1, 0))
    at = torch.arange(len(order), device=order.device)
    first, end = (at - before).clamp_min(0), (at + after + 1).clamp_max(len(order))
    return (along[end] - along[first]) / (end - first)
