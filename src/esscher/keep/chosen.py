"""Global: keys at given positions, which every query keeps (Longformer's global tokens)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esscher.keep.context import Context
from esscher.keep.registry import refused
from esscher.keep.rule import Pattern

__all__ = ["Global"]


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
