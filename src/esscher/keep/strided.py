"""Strided: every s-th key counted back from the query (Sparse Transformer)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esscher.keep.context import Context
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

    def surely(self, context: Context) -> Tensor:
        index = torch.arange(context.keys, device=context.k.device)
        return (context.positions[:, None] - index) % self.stride == 0
