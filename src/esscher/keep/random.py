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

__all__ = ["Random"]


@dataclass(frozen=True)
class Random(Chance):
    """Each of the other keys with probability ``share``; without it, with the one that makes queries keep n on average.

    ``reweight``: a kept key counts 1/share, so that the sums of the softmax keep their means (Horvitz-Thompson).
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
        return rest * _share(wanted, rest.sum(1))

    def settle(self, seen: Iterable[tuple[Context, Tensor, Tensor | None]]) -> Chance:
        if self.share is not None:
            return self
        keys, counts = 0, []
        for context, rest, wanted in seen:
            assert wanted is not None
            keys = context.keys
            counts.append(torch.stack([wanted, rest.sum(1).double()]))
        share = _share(*torch.cat(counts, 1))
        return Importance(share.expand(keys), self.reweight)


def _share(wanted: Tensor, rest: Tensor) -> Tensor:
    """The chance of each other key that makes queries keep as many as wanted, on average."""
    others = rest.double().mean()
    return (wanted.mean() / others).clamp(0, 1) if float(others) else torch.zeros_like(others)
