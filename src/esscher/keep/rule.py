"""Rule, the base class of keep rules, and ``parse``, which makes a rule from text such as
``sinks:4+recent:256``.

A rule gives key j of a query's context a probability p_j of being kept, independently, and a weight
w_j with which it then counts (1, or 1/p_j where the rule reweights). Parts combine by union: what
one part keeps surely no chance can drop, and a key that several parts may keep is dropped when all
of them drop it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esscher.keep.context import Context


def ranking(order: Tensor) -> Tensor:
    """Indices of the keys, the largest ``order`` first and of equal ones the later key: (N,) -> (1,
    N), (m, N) -> (m, N).
    """
    rows = order if order.ndim == 2 else order[None]
    if rows.device.type == "cpu":  # numpy sorts six times as fast, equal keys in any order
        down = -rows.double().numpy()
        along = np.argsort(down, axis=1)
        found = np.take_along_axis(down, along, axis=1)
        if not (found[:, 1:] == found[:, :-1]).any():
            return torch.from_numpy(along)
    return rows.shape[1] - 1 - rows.flip(1).argsort(dim=1, descending=True, stable=True)


# ---- Rules by name

_RULES: dict[str, Callable[..., Rule]] = {}
_SHORT: dict[str, str] = {}  # a rule's parts as text -> the name of this rule in the literature


def register(name: str, make: Callable[..., Rule]) -> None:
    """Add a rule: ``name:1:x=2`` in a text becomes ``make(1, x=2)``. A function that can be
    called without arguments is an alias: the rule that it makes is printed by this name.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"keep: expected a name of small letters, digits and _, got {name!r}")
    _RULES[name] = make
    parameters = inspect.signature(make).parameters.values()
    if not isinstance(make, type) and all(one.default is not one.empty for one in parameters):
        text = str(make())
        if text not in _RULES:  # heavy stays heavy, h2o is another name of it
            _SHORT[text] = name


def rules() -> dict[str, Callable[..., Rule]]:
    """All rules by name."""
    return dict(_RULES)


def usage(name: str) -> str:
    """How a rule is written: its name, then its numbers and flags."""
    parameters = inspect.signature(_RULES[name]).parameters.values()
    flags = (isinstance(one.default, bool) for one in parameters)
    words = (
        one.name if flag else one.name.upper() for one, flag in zip(parameters, flags, strict=True)
    )
    return ":".join([name, *words])


def refused(message: str, name: str = "") -> ValueError:
    """The error for a bad rule, in one line: the names nearest to ``name``, and what lists all."""
    near = difflib.get_close_matches(name, _RULES, 3, cutoff=0.7)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return ValueError(f"{message}; {hint}esscher rules lists all rules")


# ---- Rules and their parts

ANY_CACHE, WEIGHTS, ALL_KEYS = WHERE = ("any cache", "needs weights", "needs all keys")


@dataclass(frozen=True)
class Inclusion:
    """Probabilities (m, N), 0 where a query does not see the key, and weights (m, N) or None."""

    probability: Tensor
    weight: Tensor | None = None

    @property
    def sure(self) -> Tensor:
        """Keys that are always kept, (m, N)."""
        return self.probability == 1

    @property
    def size(self) -> Tensor:
        """Keys kept on average by each query, (m,)."""
        return self.probability.sum(1)


class Scales(NamedTuple):
    """Probabilities min(1, factor gain) at S sizes; a sure key has an infinite gain. Kept keys
    count ``weight`` times, or one over their probability.
    """

    gain: Tensor  # (m, N) float64
    factor: Tensor  # (m, S)
    weight: Tensor | None = None  # (m, N)
    reweight: bool = False
    alike: bool = False  # gains are 0, 1 and infinite, and all queries have one factor
    size: Tensor | None = None  # (m, S): keys kept on average

    def take(self, rows: slice | Tensor, sizes: slice = slice(None)) -> Scales:
        """For some of the queries, at some of the sizes."""
        weight = None if self.weight is None else self.weight[rows]
        return self._replace(
            gain=self.gain[rows], factor=self.factor[rows, sizes], weight=weight, size=None
        )

    def at(self, place: int) -> tuple[Tensor, Tensor | None]:
        """p and w at one size."""
        p = self.gain * self.factor[:, place, None]  # 0 times infinity: never kept
        p = p.nan_to_num_(0.0, posinf=1.0).clamp_(max=1).masked_fill_(self.gain == torch.inf, 1.0)
        return p, torch.where(p > 0, 1 / p, 1.0) if self.reweight else self.weight


class Rule(ABC):
    """Which keys each query keeps: one part, or a union of parts."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]: ...

    def __or__(self, other: Rule) -> Union:
        if not isinstance(other, Rule):
            return NotImplemented
        return Union((*self.parts, *other.parts))

    @property
    def free(self) -> Part | None:
        """The part without a number of its own: the caller's n is its size."""
        return next((part for part in self.parts if part.is_open), None)

    def include(self, context: Context, n: int | None = None) -> Inclusion:
        """Probabilities and weights; ``n``: keys kept in all, where a part has no number."""
        return next(self.ladder(context, [n]))

    def ladder(self, context: Context, counts: Sequence[int | None]) -> Iterator[Inclusion]:
        """``include`` for each n of a ladder; the keys of parts with numbers are found once."""
        held, free = self.start(context, counts), self.free
        chances = [part for part in self.parts if isinstance(part, Chance)]
        reweight = bool(chances) and chances[0].reweight
        sure, rest, kept = held, context.visible & ~held, held.sum(1).double()
        for n in counts:
            if free is not None and not isinstance(free, Chance):
                sure = held | free.fill(context, held, n or 0)
                rest, kept = context.visible & ~sure, sure.sum(1).double()
            p, alone = None, bool(rest.all())
            for part in chances:
                wanted = n - kept if part is free and n is not None else None
                chance = part.probability(context, rest, wanted).double()
                p = chance if p is None else p + chance * (1 - p)
            if p is None:
                p = sure.double()
            elif not alone or p.shape != rest.shape:
                p = (p * rest).add_(sure)
            weight = (p == 0).double().add_(p).reciprocal_() if reweight else None
            yield Inclusion(p, weight)

    def scales(self, context: Context, counts: Sequence[int | None]) -> Scales | None:
        """The chances at every n of a ladder, where the part without a number is the only one that
        leaves keys to chance and scales.
        """
        chances = [part for part in self.parts if isinstance(part, Chance)]
        if len(chances) != 1 or chances[0] is not self.free:
            return None
        held = self.start(context, counts)
        rest, kept = context.visible & ~held, held.sum(1, keepdim=True).double()
        n = torch.tensor([count or 0 for count in counts], device=kept.device)
        found = chances[0].scale(context, rest, n - kept)
        if found is None:
            return None
        gain, factor = found
        gain = gain * rest
        size = kept + torch.where(factor < torch.inf, n - kept, (gain > 0).sum(1, keepdim=True))
        if chances[0].alike:
            size = kept + factor * rest.sum(1, keepdim=True)
        gain = gain.masked_fill_(held, torch.inf)
        factor = factor.expand(len(gain), -1)
        return Scales(gain, factor, None, chances[0].reweight, chances[0].alike, size)

    def start(self, context: Context, counts: Sequence[int | None]) -> Tensor:
        """The keys that parts with numbers keep, (m, N), after a check of every n of a ladder."""
        for n in counts:
            self.check(context, n)
        held = self.held(context)
        least = _least(held)
        for n in counts:
            if n is not None and n < least:
                raise ValueError(
                    f"n: {self} keeps {least} keys surely; expected at least as many, got {n}"
                )
        return held

    def check(self, context: Context, n: int | None) -> None:
        """Raise where n is missing, not wanted or out of range, or a number does not fit the
        context.
        """
        free = self.free
        if (n is None) != (free is None):
            came = "got none" if n is None else f"got {n}"
            wanted = (
                "no n: every number of the rule is given"
                if free is None
                else f"n: {free.name} has no number of its own"
            )
            raise ValueError(f"n: the rule {self} expects {wanted}; {came}")
        if n is not None and not 1 <= n <= context.keys:
            raise ValueError(f"n: expected 1 to {context.keys} keys, got {n}")
        for part in self.parts:
            part.check_numbers(context)

    def held(self, context: Context) -> Tensor:
        """Keys that parts with numbers always keep, (m, N)."""
        sure = torch.zeros_like(context.visible)
        for part in self.parts:
            sure |= part.surely(context)
        return sure & context.visible

    def least(self, context: Context) -> int:
        """The smallest n that the rule allows."""
        return _least(self.held(context))

    @property
    def where(self) -> str:
        """Where it can be deployed, one of WHERE."""
        if any(part.per_query for part in self.parts):
            return ALL_KEYS
        weighted = any(isinstance(part, Chance) and part.reweight for part in self.parts)
        return WEIGHTS if weighted else ANY_CACHE

    def __str__(self) -> str:
        text = "+".join(part.text() for part in self.parts)
        return _SHORT.get(text, text)


def _least(held: Tensor) -> int:
    return max(1, math.ceil(float(held.sum(1).double().mean()) - 1e-9))


class Part(Rule):
    """One part of a rule: a frozen dataclass whose fields are the numbers of its text. Whole
    numbers are at least 1, others above 0 and up to 1; None: left open.

    ``per_query``: every query chooses keys by its own scores, so that all keys must stay in the
    cache. ``observes``: it chooses one set of keys for all queries by what ``context.choosing``
    attend to. ``alone``: it joins no other part.
    """

    name: ClassVar[str]
    alone: ClassVar[bool] = False
    per_query: bool = False
    observes: bool = False

    def __post_init__(self) -> None:
        for i, field in enumerate(fields(self)):  # type: ignore[arg-type]
            value, kind = getattr(self, field.name), str(field.type)
            if value is None or kind.removesuffix(" | None") not in ("int", "float"):
                continue
            whole = kind.startswith("int")
            fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if not fits or not 0 < value <= (math.inf if whole else 1):
                label = self.name if i == 0 else f"{self.name}, {field.name}"
                wanted = "whole number of at least 1" if whole else "number above 0 and up to 1"
                raise refused(f"{label}: expected a {wanted}, got {value!r}")

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self,)

    @property
    def is_open(self) -> bool:
        """Whether its first number was left out: the caller's n takes its place."""
        numbers = fields(self)  # type: ignore[arg-type]
        return bool(numbers) and getattr(self, numbers[0].name) is None

    def check_numbers(self, context: Context) -> None:
        """ValueError where its numbers do not fit the context."""

    def surely(self, context: Context) -> Tensor:
        """Keys that it always keeps by its own number, (m, N) or (N,)."""
        return torch.zeros_like(context.visible)

    def fill(self, context: Context, sure: Tensor, n: int) -> Tensor:
        """Keys that it adds to the ``sure`` ones where it has no number, so that every query keeps
        n.
        """
        return torch.zeros_like(sure)

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


@dataclass(frozen=True)
class Ranked(Part):
    """The ``size`` first keys of an order; without a size, as many as n leaves to it."""

    size: int | None = None

    @abstractmethod
    def order(self, context: Context) -> Tensor:
        """Larger is kept sooner, of equal ones the later key: (N,) for all queries, or (m, N)."""

    def check_numbers(self, context: Context) -> None:
        if self.size is not None and self.size > context.keys:
            raise refused(
                f"{self.name}: expected at most {context.keys}, the number of keys, got {self.size}"
            )

    def surely(self, context: Context) -> Tensor:
        if self.size is None:
            return torch.zeros_like(context.visible)
        return first_of(
            self.order(context), context.visible, torch.full_like(context.positions, self.size)
        )

    def fill(self, context: Context, sure: Tensor, n: int) -> Tensor:
        return first_of(
            self.order(context), context.visible & ~sure, n - (sure & context.visible).sum(1)
        )


def first_of(order: Tensor, among: Tensor, count: Tensor) -> Tensor:
    """The ``count`` (m,) keys that come first among those allowed, (m, N)."""
    along = ranking(order).expand(len(among), -1)
    taken = among.gather(1, along)
    first = taken & (taken.cumsum(1, dtype=torch.int32) <= count[:, None])
    return torch.zeros_like(first).scatter(1, along, first)


class Chance(Part):
    """Keys kept by chance, among those that no part keeps surely."""

    reweight: bool
    shared: bool = False  # whether one draw of a key serves all queries
    alike: ClassVar[bool] = False  # whether all keys have one probability

    @abstractmethod
    def probability(self, context: Context, rest: Tensor, wanted: Tensor | None) -> Tensor:
        """(m, N), or a number for all; that of keys outside ``rest`` does not matter. ``wanted``
        (m,): keys to keep on average, None with a number of its own.
        """

    def scale(self, context: Context, rest: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor] | None:
        """Gains (m, N) and factors (m, S), or one row for all, so that min(1, factor gain) is the
        probability where a query keeps ``wanted`` (m, S) keys; None where it is not such a product.
        """
        return None


@dataclass(frozen=True)
class Union(Rule):
    """Parts together."""

    members: tuple[Part, ...]

    def __post_init__(self) -> None:
        lone = [part.text() for part in self.members if part.alone]
        if lone and len(self.members) > 1:
            raise refused(f"keep: {lone[0]} mixes all keys and joins no other part, got {self}")
        free = [part.text() for part in self.members if part.is_open]
        if len(free) > 1:
            raise refused(
                f"keep: one part at most may leave its number open, got {' and '.join(free)}; give"
                " the others theirs"
            )
        if len({part.reweight for part in self.members if isinstance(part, Chance)}) > 1:
            raise refused(
                f"keep: of the parts that keep by chance either all reweight or none, got {self}"
            )

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.members


# ---- Rules as text: parts joined by +, each a name and its numbers,
# ``sinks:4+recent:256+random:0.1:reweight``.


def parse(text: str | Rule) -> Rule:
    """The rule of a text; a rule is returned as it is."""
    if isinstance(text, Rule):
        return text
    if not isinstance(text, str) or not text.strip():
        raise refused(f"keep: expected a rule such as sinks:4+recent:256, got {text!r}")
    return functools.reduce(operator.or_, (_part(piece.strip(), text) for piece in text.split("+")))


def _part(piece: str, text: str) -> Rule:
    name, *words = piece.split(":")
    make = rules().get(name)
    if make is None:
        raise refused(f"keep: no rule {name!r}" + f" in {text!r}" * (name != text), name)
    numbers: list[object] = []
    named: dict[str, object] = {}
    for word in words:
        key, equals, value = word.partition("=")
        is_flag = not equals and re.fullmatch(r"[a-z_]+", word)
        if not equals and not is_flag:
            numbers.append(_value(word, text))
        elif key.strip() in named:
            raise refused(f"keep: {key.strip()} is given twice in {piece!r}")
        else:
            named[key.strip()] = True if is_flag else _value(value, text)
    signature = inspect.signature(make)
    parameters = signature.parameters
    try:
        given = signature.bind(*numbers, **named).arguments
        for field, value in given.items():
            if isinstance(parameters[field].default, bool) != isinstance(value, bool):
                raise TypeError(f"got {field}={value!r}")
    except TypeError as cause:
        told = f"keep: {piece!r} is not how {name} is written: {usage(name)} ({cause})"
        raise refused(told) from None
    return make(*numbers, **named)


def _value(word: str, text: str) -> object:
    try:
        if "," in word:
            return tuple(int(x) for x in word.split(","))
        return int(word) if re.fullmatch(r"\s*-?\d+\s*", word) else float(word)
    except ValueError:
        raise refused(f"keep: expected a number, got {word!r} in {text!r}") from None


# ---- Queries in blocks, so that no matrix of all queries and keys is held whole.

# of queries and keys open at once: four megabytes for each matrix that a rule makes of them
PAIRS = 1 << 19


def blocks(context: Context) -> Iterator[tuple[Tensor, Context]]:
    """Rows and what the queries in them see; the context itself where it is small or has its
    scores.
    """
    rows = torch.arange(len(context.q), device=context.k.device)
    step = max(1, PAIRS // context.keys)
    if len(rows) <= step or "scores" in vars(context):
        yield rows, context
        return
    for part in torch.split(rows, step):
        yield part, context.take(part)
