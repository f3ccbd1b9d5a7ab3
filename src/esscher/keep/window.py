"""Window: the keys near a query, on either side as far as it sees (Longformer, BigBird)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esscher.keep.context import Context
from esscher.keep.rule import Pattern
from esscher.keep.sizes import as_size

__all__ = ["Window"]


@dataclass(frozen=True)
class Window(Pattern):
    """Keys at most ``width`` positions away."""

    name: ClassVar[str] = "window"
    width: int

    def __post_init__(self) -> None:
        as_size(self.width, "window")

    def surely(self, context: Context) -> Tensor:
        index = torch.arange(context.keys, device=context.k.device)
        return (index - context.positions[:, None]).abs() <= self.width
