"""KeyNorm: keys of small norm, which tend to be attended to (Devoto et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from esscher.keep.context import Context
from esscher.keep.rule import Ranked
from esscher.keep.sizes import as_size

__all__ = ["KeyNorm"]


@dataclass(frozen=True)
class KeyNorm(Ranked):
    """The ``size`` keys of smallest norm."""

    name: ClassVar[str] = "keynorm"
    size: int | None = None

    def __post_init__(self) -> None:
        as_size(self.size, "keynorm")

    def order(self, context: Context) -> Tensor:
        return -context.k.double().square().sum(1)
