"""Recent: the keys nearest to a query, its own among them; for a causal query the last that it sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esscher.keep.context import Context
from esscher.keep.rule import Ranked
from esscher.keep.sizes import as_size

__all__ = ["Recent"]


@dataclass(frozen=True)
class Recent(Ranked):
    """The ``size`` keys nearest to the query's position: the last ones, where it sees no later key."""

    name: ClassVar[str] = "recent"
    size: int | None = None

    def __post_init__(self) -> None:
        as_size(self.size, "recent")

    def order(self, context: Context) -> Tensor:
        index = torch.arange(context.keys, device=context.k.device)
        return index if context.mask is None else -(index - context.positions[:, None]).abs()
