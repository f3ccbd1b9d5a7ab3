"""Random: every key with one probability."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esscher.keep.context import Context
from esscher.keep.importance import Importance
from esscher.keep.rule import Chance
from esscher.keep.sizes import as_fraction

__all__ = ["Random", "share_of"]


@dataclass(frozen=True)
class Random(Chance):
    """Each of the other keys with probability ``share``; without it, with the one that makes
    queries keep n on average.

    ``reweight``: a kept key counts 1/share, so that the sums of the softmax keep their means
    (Horvitz-Thompson).
    """

    name: ClassVar[str] = "random"
    share: float | None = None
    reweight: bool = False

    def __post_init__(self) -> None:
        as_fraction(self.share, "random")

    @property
    def is_open(self) -> bool:
        return self.share is None

    def probability(self, context: Context, rest: Tensor, wanted: Tensor | None) -> Tensor:
        if self.share is not None:
            return rest.double() * self.share
        assert wanted is not None
        return rest.double() * share_of(wanted, rest.sum(1))

    def settle(self, seen: Iterable[tuple[Context, Tensor, Tensor | None]]) -> Chance:
        if self.share is not None:
            return self
        keys, counts = 0, []
        for context, rest, wanted in seen:
            assert wanted is not None
            keys = context.keys
            counts.append(torch.stack([wanted, rest.sum(1).double()]))
        share = share_of(*torch.cat(counts, 1))
        return Importance(torch.full((keys,), share, dtype=torch.float64), self.reweight)


def share_of(wanted: Tensor, rest: Tensor) -> float:
    """The chance of each other key that makes queries keep as many as wanted (m,) of the rest (m,),
    on average.
    """
    others = float(rest.double().mean())
    return min(max(float(wanted.mean()) / others, 0.0), 1.0) if others else 0.0
