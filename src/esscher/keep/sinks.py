"""Sinks: the first keys of the context, on which attention rests when nothing asks for it
(StreamingLLM).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esscher.keep.rule import PlacedOrder
from esscher.keep.sizes import as_size

__all__ = ["Sinks"]


@dataclass(frozen=True)
class Sinks(PlacedOrder):
    """The first ``size`` keys."""

    name: ClassVar[str] = "sinks"
    size: int | None = None

    def __post_init__(self) -> None:
        as_size(self.size, "sinks")

    @property
    def is_local(self) -> bool:
        return self.size is not None

    def keeps(self, position: Tensor, key: Tensor) -> Tensor:
        return (key < (self.size or 0)) & (position >= 0)

    def rank(self, keys: Tensor) -> Tensor:
        return -keys

    def reach(self, positions: Tensor, n: int | None) -> Tensor:
        return torch.arange(self.size or n or 0, device=positions.device)
