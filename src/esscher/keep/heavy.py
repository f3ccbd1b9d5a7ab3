"""Heavy: the keys to which the queries of a key-value head attend most, one set for all of them (H2O, SnapKV)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esscher.keep.blocks import blocks
from esscher.keep.context import Context
from esscher.keep.rule import Ranked
from esscher.keep.sizes import as_size

__all__ = ["Heavy"]


@dataclass(frozen=True)
class Heavy(Ranked):
    """The ``size`` keys of largest mean softmax weight over the queries at the ``last`` positions, or over all of them.

    Queries that stand all at one place are counted in the order of their rows.
    """

    name: ClassVar[str] = "heavy"
    size: int | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        as_size(self.size, "heavy")
        as_size(self.last, "heavy, last")

    def order(self, context: Context) -> Tensor:
        observed = self._observed(context)
        total = torch.zeros(context.keys, dtype=torch.float64, device=context.k.device)
        for rows, part in blocks(context):
            total += part.attention[observed[rows]].sum(0)
        return total / observed.sum()

    def _observed(self, context: Context) -> Tensor:
        places = torch.unique(context.positions)
        if self.last is None:
            return torch.ones_like(context.positions, dtype=torch.bool)
        if len(places) == 1:
            rows = torch.arange(len(context.positions), device=places.device)
            return rows >= len(rows) - self.last
        return torch.ge(context.positions, places[-min(self.last, len(places))])
