"""TopK: the keys with the largest scores of each query; the oracle of sparse attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from esscher.keep.context import Context
from esscher.keep.rule import Ranked
from esscher.keep.sizes import as_size

__all__ = ["TopK"]


@dataclass(frozen=True)
class TopK(Ranked):
    """The ``size`` keys of largest score, for each query its own."""

    name: ClassVar[str] = "topk"
    size: int | None = None

    def __post_init__(self) -> None:
        as_size(self.size, "topk")

    @property
    def per_query(self) -> bool:
        return True

    def order(self, context: Context) -> Tensor:
        return context.scores
