"""Importance: each key with a probability given for it, reweighted; and the chances of hash
collisions (MagicPIG).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from esscher.inputs import as_tensor
from esscher.keep.context import Context
from esscher.keep.registry import refused
from esscher.keep.rule import Chance
from esscher.keep.sizes import as_size

__all__ = ["Importance", "MagicPIG"]


@dataclass(frozen=True, eq=False)
class Importance(Chance):
    """Key j with the given probability, (N,) or (m, N); ``shared``: one draw of a key for all
    queries.
    """

    name: ClassVar[str] = "importance"
    given: Any = field(repr=False)
    reweight: bool = True
    shared: bool = False

    def __post_init__(self) -> None:
        given = as_tensor(self.given, "importance").detach().double()
        if given.ndim not in (1, 2) or bool((given < 0).any()) or bool((given > 1).any()):
            raise refused(
                "importance: expected probabilities from 0 to 1, one for each key (and query)"
            )
        if self.shared and given.ndim == 2:
            raise refused(
                "importance: what queries share has one probability for each key, got shape"
                f" {tuple(given.shape)}"
            )
        object.__setattr__(self, "given", given)

    def check_numbers(self, context: Context) -> None:
        shapes = (context.keys,), (len(context.q), context.keys)
        if self.given.shape not in shapes:
            raise refused(
                f"importance: expected probabilities of shape {shapes[0]} or {shapes[1]}, got"
                f" {tuple(self.given.shape)}"
            )

    def probability(self, context: Context, rest: Tensor, wanted: Tensor | None) -> Tensor:
        given: Tensor = self.given.to(rest.device)
        return rest * given

    def take(self, rows: Tensor) -> Chance:
        return (
            self
            if self.given.ndim == 1
            else replace(self, given=self.given[rows.to(self.given.device)])
        )

    def text(self) -> str:
        """Its name: given probabilities cannot be written, and no text is read as them."""
        return self.name


@dataclass(frozen=True)
class MagicPIG(Chance):
    """A key is kept if it falls into the query's bucket in at least 2 of ``tables`` tables of
    ``bits`` signs each.

    Signs of random projections agree with probability s = 1 - angle/pi; all bits of a table with r
    = s^bits; so that p = 1 - (1 - r)^tables - tables r (1 - r)^(tables - 1). Keys are centred
    first, as MagicPIG does.
    """

    name: ClassVar[str] = "magicpig"
    bits: int = 10
    tables: int = 150
    reweight: bool = True

    def __post_init__(self) -> None:
        as_size(self.bits, "magicpig, bits")
        as_size(self.tables, "magicpig, tables", least=2)

    @property
    def per_query(self) -> bool:
        return True

    def probability(self, context: Context, rest: Tensor, wanted: Tensor | None) -> Tensor:
        k = context.k.double() - context.k.double().mean(0)
        cosine = (
            torch.nn.functional.normalize(context.q.double(), dim=1)
            @ torch.nn.functional.normalize(k, dim=1).T
        )
        same = (1 - torch.acos(cosine.clamp(-1, 1)) / math.pi) ** self.bits
        apart = (1 - same) ** (self.tables - 1)
        return rest * (1 - apart * (1 - same) - self.tables * same * apart).clamp(0, 1)
