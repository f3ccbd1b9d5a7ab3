"""Strided: every s-th key counted back from the query (Sparse Transformer)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esscher.keep.rule import Pattern
from esscher.keep.sizes import as_size

__all__ = ["Strided"]


@dataclass(frozen=True)
class Strided(Pattern):
    """Keys whose distance from the query is a multiple of ``stride``."""

    name: ClassVar[str] = "strided"
    stride: int

    def __post_init__(self) -> None:
        as_size(self.stride, "strided")

    @property
    def period(self) -> int:
        return self.stride

    def keeps(self, position: Tensor, key: Tensor) -> Tensor:
        return (position - key) % self.stride == 0

    def reach(self, positions: Tensor, n: int | None) -> Tensor:
        turns = torch.arange(0, int(positions[-1]) + 1, self.stride, device=positions.device)
        residues = torch.unique(positions % self.stride)
        return torch.flatten(turns[:, None] + residues)
