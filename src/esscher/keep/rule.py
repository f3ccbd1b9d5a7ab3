"""What a keep rule is: parts that name keys surely, by a pattern or a ranking, and parts that keep keys by chance.

A rule gives key j of a query's context a probability p_j of being kept, independently, and a weight w_j with which it then
counts (1, or 1/p_j where the rule reweights). Parts combine by union: what one part keeps surely no chance can drop, and a key
that several parts may keep is dropped when all of them drop it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from esscher.keep.context import Context

__all__ = ["Chance", "Inclusion", "Part", "Pattern", "Ranked", "Rule", "Union"]


@dataclass(frozen=True)
class Inclusion:
    """Probabilities (m, N), 0 where a query does not see the key, and weights (m, N); None: every kept key counts 1."""

    probability: Tensor
    weight: Tensor | None = None

    @property
    def sure(self) -> Tensor:
        """Keys that are kept whatever happens, (m, N)."""
        return self.probability == 1

    @property
    def share(self) -> float | None:
        """The one probability of all keys that chance decides; None where there are none, or several."""
        by_chance = self.probability[(self.probability > 0) & (self.probability < 1)]
        if by_chance.numel() == 0 or not bool((by_chance == by_chance[0]).all()):
            return None
        return float(by_chance[0])

    @property
    def size(self) -> Tensor:
        """Keys kept on average by each query, (m,)."""
        return self.probability.sum(1)


class Rule(ABC):
    """Anything that says which keys are kept."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]: ...

    def __or__(self, other: Rule) -> Union:
        if not isinstance(other, Rule):
            return NotImplemented
        return Union((*self.parts, *other.parts))

    @property
    def free(self) -> Part | None:
        """The part whose size is not given: n is for it."""
        return next((part for part in self.parts if part.is_open), None)

    def include(self, context: Context, n: int | None = None) -> Inclusion:
        """Probabilities and weights for the queries of a context; ``n``: keys kept in all, where a part has no number."""
        free = self.free
        if (n is None) != (free is None):
            came = "got none" if n is None else f"got {n}"
            wanted = "no n: every number of the rule is given" if free is None else f"n: {free.name} has no number of its own"
            raise ValueError(f"n: the rule {self} expects {wanted}; {came}")
        if n is not None and not 1 <= n <= context.keys:
            raise ValueError(f"n: expected 1 to {context.keys} keys, got {n}")
        sure = self._held(context)
        if n is not None and n < (least := self.least(context)):
            raise ValueError(f"n: {self} keeps {least} keys surely; expected at least as many, got {n}")
        if isinstance(free, Ranked):
            sure |= free.fill(context, sure, n or 0)
        return _with_chance(self, context, sure, n)

    def _held(self, context: Context) -> Tensor:
        """Keys that the parts with numbers keep whatever happens, (m, N)."""
        sure = torch.zeros_like(context.visible)
        for part in self.parts:
            sure |= part.surely(context)
        return sure & context.visible

    def least(self, context: Context) -> int:
        """The smallest n of its ladder: what it keeps surely, on average over the queries, and one key at least."""
        return max(1, math.ceil(float(self._held(context).sum(1).double().mean()) - 1e-9))

    def __str__(self) -> str:
        return "+".join(part.text() for part in self.parts)


def _with_chance(rule: Rule, context: Context, sure: Tensor, n: int | None) -> Inclusion:
    chances = [part for part in rule.parts if isinstance(part, Chance)]
    if not chances:
        return Inclusion(sure.double())
    rest = context.visible & ~sure
    dropped = torch.ones_like(context.scores)
    for part in chances:
        wanted = None
        if part.is_open and n is not None:
            wanted = n - sure.sum(1).double()
        dropped = dropped * (1 - part.probability(context, rest, wanted))
    probability = torch.where(sure, 1.0, torch.where(rest, 1 - dropped, 0.0))
    if not chances[0].reweight:
        return Inclusion(probability)
    return Inclusion(probability, torch.where(probability > 0, 1 / probability, 1.0))


class Part(Rule):
    """One part of a rule: a frozen dataclass whose fields are the numbers of its text."""

    name: ClassVar[str]

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self,)

    @property
    def is_open(self) -> bool:
        """Whether its number was left out: n is for it."""
        return False

    def surely(self, context: Context) -> Tensor:
        """Keys it keeps whatever happens, (m, N) or (N,), as far as its own number says."""
        return torch.zeros_like(context.visible)

    def text(self) -> str:
        """``name:number:flag:key=value``; what has its default is left out."""
        words = [self.name]
        for i, field in enumerate(fields(self)):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if value is True:
                words.append(field.name)
            elif i == 0:
                words.append(_written(value))
            else:
                words.append(f"{field.name}={_written(value)}")
        return ":".join(words)


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(str(x) for x in value)
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


class Pattern(Part):
    """Keys by their places alone, all of them kept."""

    @abstractmethod
    def surely(self, context: Context) -> Tensor: ...


class Ranked(Part):
    """The ``size`` first keys of an order; without a size, as many as n leaves to it."""

    size: int | None

    @property
    def is_open(self) -> bool:
        return self.size is None

    @abstractmethod
    def order(self, context: Context) -> Tensor:
        """Larger is kept sooner: (N,) for all queries alike, or (m, N). Equal ones: the later key first."""

    def surely(self, context: Context) -> Tensor:
        if self.size is None:
            return torch.zeros_like(context.visible)
        if self.size > context.keys:
            raise ValueError(f"{self.name}: expected at most {context.keys}, the number of keys, got {self.size}")
        return self._first(context, context.visible, torch.full_like(context.positions, self.size))

    def fill(self, context: Context, sure: Tensor, n: int) -> Tensor:
        """The first of the keys that are not kept anyway, so that every query keeps n."""
        return self._first(context, context.visible & ~sure, n - (sure & context.visible).sum(1))

    def _first(self, context: Context, among: Tensor, count: Tensor) -> Tensor:
        order = self.order(context).double().expand_as(among).masked_fill(~among, -torch.inf)
        place = (
            order.flip(1).argsort(dim=1, descending=True, stable=True).argsort(dim=1).flip(1)
        )  # the later of equal ones first
        return among & (place < count[:, None])


class Chance(Part):
    """Keys kept by chance, among those that no part keeps surely."""

    reweight: bool

    @abstractmethod
    def probability(self, context: Context, rest: Tensor, wanted: Tensor | None) -> Tensor:
        """(m, N) on ``rest``; ``wanted`` (m,): keys to keep on average, None where the part has its own number."""


@dataclass(frozen=True)
class Union(Rule):
    """Parts together."""

    members: tuple[Part, ...]

    def __post_init__(self) -> None:
        free = [part.text() for part in self.members if part.is_open]
        if len(free) > 1:
            raise ValueError(
                f"keep: one part at most may leave its number open, got {' and '.join(free)}; give the others theirs"
            )
        if len({part.reweight for part in self.members if isinstance(part, Chance)}) > 1:
            raise ValueError(f"keep: of the parts that keep by chance either all reweight or none, got {self}")

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.members

    __str__ = Rule.__str__
