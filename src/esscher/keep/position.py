"""Sinks: the first keys of the context, on which attention rests when nothing asks for it
(StreamingLLM).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esscher.keep.context import Context
from esscher.keep.rule import Pattern, PlacedOrder, as_size, refused


@dataclass(frozen=True)
class Sinks(PlacedOrder):
    """The first ``size`` keys that a query sees; in a sliding window the first ones inside it."""

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


# ---- Recent: the keys nearest to a query, its own among them; for a causal query the last that
# it sees.


@dataclass(frozen=True)
class Recent(PlacedOrder):
    """The ``size`` keys nearest to the query's position: the last ones, where it sees no
    later key.
    """

    name: ClassVar[str] = "recent"
    size: int | None = None

    def __post_init__(self) -> None:
        as_size(self.size, "recent")

    @property
    def is_local(self) -> bool:
        return self.size is not None

    @property
    def back(self) -> int | None:
        return None if self.size is None else self.size - 1

    def keeps(self, position: Tensor, key: Tensor) -> Tensor:
        return key > position - (self.size or 0)

    def rank(self, keys: Tensor) -> Tensor:
        return keys

    def reach(self, positions: Tensor, n: int | None) -> Tensor:
        first = int(positions[0]) + 1 - (self.size or n or 0)
        return torch.arange(max(0, first), int(positions[-1]) + 1, device=positions.device)

    def order(self, context: Context) -> Tensor:
        index = torch.arange(context.keys, device=context.k.device)
        return index if context.mask is None else -(index - context.positions[:, None]).abs()


# ---- Window: the keys near a query, on either side as far as it sees (Longformer, BigBird).


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


# ---- Strided: every s-th key counted back from the query (Sparse Transformer).


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


# ---- Global: keys at given positions, which every query keeps (Longformer's global tokens).


@dataclass(frozen=True)
class Global(Pattern):
    """Keys at the positions ``at``."""

    name: ClassVar[str] = "global"
    at: tuple[int, ...]

    def __post_init__(self) -> None:
        at = (self.at,) if isinstance(self.at, int) else tuple(self.at)
        if not at or any(isinstance(x, bool) or not isinstance(x, int) or x < 0 for x in at):
            raise refused(f"global: expected positions from 0 on, got {self.at!r}")
        object.__setattr__(self, "at", at)

    def check_numbers(self, context: Context) -> None:
        if max(self.at) >= context.keys:
            raise refused(
                f"global: expected positions below {context.keys}, the number of keys, got"
                f" {max(self.at)}"
            )

    def keeps(self, position: Tensor, key: Tensor) -> Tensor:
        return torch.isin(key, torch.tensor(self.at, device=key.device)) & (position >= 0)

    def reach(self, positions: Tensor, n: int | None) -> Tensor:
        return torch.tensor(sorted(set(self.at)), device=positions.device)
