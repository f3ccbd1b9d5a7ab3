"""Window: the keys near a query, on either side as far as it sees (Longformer, BigBird)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

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

    @property
    def back(self) -> int:
        return self.width

    def keeps(self, position: Tensor, key: Tensor) -> Tensor:
        return (key - position).abs() <= self.width
