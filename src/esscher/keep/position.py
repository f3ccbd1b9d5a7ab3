"""Rules by position: first keys, last keys, windows, strides, given positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esscher.keep.context import Context
from esscher.keep.rule import Part, Ranked, refused


class Sinks(Ranked):
    """The first ``size`` keys that a query sees (attention sinks, StreamingLLM)."""

    name = "sinks"

    def order(self, context: Context) -> Tensor:
        return -context.index


class Recent(Ranked):
    """The ``size`` keys nearest to the query's position."""

    name = "recent"

    def order(self, context: Context) -> Tensor:
        index = context.index
        return index if context.mask is None else -(index - context.positions[:, None]).abs()


@dataclass(frozen=True)
class Window(Part):
    """Keys at most ``width`` positions away, on either side (Longformer, BigBird)."""

    name: ClassVar[str] = "window"
    width: int

    def surely(self, context: Context) -> Tensor:
        return (context.index - context.positions[:, None]).abs() <= self.width


@dataclass(frozen=True)
class Strided(Part):
    """Keys whose distance from the query is a multiple of ``stride`` (Sparse Transformer); without
    a stride, n evenly spaced ones, counted back from the last that the query sees.
    """

    name: ClassVar[str] = "strided"
    stride: int | None = None

    def surely(self, context: Context) -> Tensor:
        if self.stride is None:
            return torch.zeros_like(context.visible)
        return (context.positions[:, None] - context.index) % self.stride == 0

    def fill(self, context: Context, sure: Tensor, n: int) -> Tensor:
        among = context.visible & ~sure
        count = among.sum(1, keepdim=True)
        back = count - among.cumsum(1)  # 0 is the last
        wanted = (n - (sure & context.visible).sum(1, keepdim=True)).clamp(min=0)
        return among & (back * wanted % count.clamp_min(1) < wanted)


@dataclass(frozen=True)
class Global(Part):
    """Keys at the positions ``at``, which every query keeps (Longformer's global tokens)."""

    name: ClassVar[str] = "global"
    at: tuple[int, ...]

    def __post_init__(self) -> None:
        at = (self.at,) if isinstance(self.at, int) else tuple(self.at)
        if not at or any(isinstance(x, bool) or not isinstance(x, int) or x < 0 for x in at):
            raise refused(f"global: expected positions from 0 on, got {self.at!r}")
        object.__setattr__(self, "at", at)

    def surely(self, context: Context) -> Tensor:
        return torch.isin(context.index, torch.tensor(self.at, device=context.index.device))
