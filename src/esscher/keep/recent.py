"""Recent: the keys nearest to a query, its own among them; for a causal query the last that it
sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esscher.keep.context import Context
from esscher.keep.rule import PlacedOrder
from esscher.keep.sizes import as_size

__all__ = ["Recent"]


@dataclass(frozen=True)
class Recent(PlacedOrder):
    """The ``size`` keys nearest to the query's position: the last ones, where it sees no
    later key.
    """

    name: ClassVar[str] = "recent"
    size: int | None = None

    def __post_init__(self) -> None:
        as_size(self.size, "recent")

    @property
    def is_local(self) -> bool:
        return self.size is not None

    @property
    def back(self) -> int | None:
        return None if self.size is None else self.size - 1

    def keeps(self, position: Tensor, key: Tensor) -> Tensor:
        return key > position - (self.size or 0)

    def rank(self, keys: Tensor) -> Tensor:
        return keys

    def reach(self, positions: Tensor, n: int | None) -> Tensor:
        first = int(positions[0]) + 1 - (self.size or n or 0)
        return torch.arange(max(0, first), int(positions[-1]) + 1, device=positions.device)

    def order(self, context: Context) -> Tensor:
        index = torch.arange(context.keys, device=context.k.device)
        return index if context.mask is None else -(index - context.positions[:, None]).abs()
