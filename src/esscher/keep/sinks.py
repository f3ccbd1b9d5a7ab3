"""Sinks: the first keys of the context, on which attention rests when nothing asks for it (StreamingLLM)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esscher.keep.context import Context
from esscher.keep.rule import Ranked
from esscher.keep.sizes import as_size

__all__ = ["Sinks"]


@dataclass(frozen=True)
class Sinks(Ranked):
    """The first ``size`` keys."""

    name: ClassVar[str] = "sinks"
    size: int | None = None

    def __post_init__(self) -> None:
        as_size(self.size, "sinks")

    def order(self, context: Context) -> Tensor:
        return -torch.arange(context.keys, device=context.k.device)
