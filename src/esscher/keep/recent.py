"""Recent: the last keys that a query sees, its own among them."""

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
    """The last ``size`` keys up to the query's position."""

    name: ClassVar[str] = "recent"
    size: int | None = None

    def __post_init__(self) -> None:
        as_size(self.size, "recent")

    def order(self, context: Context) -> Tensor:
        return torch.arange(context.keys, device=context.k.device)
