"""Heavy: the keys to which the queries of a key-value head attend most, one set for all of them
(H2O, SnapKV).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esscher.keep.chance import gain
from esscher.keep.context import Context
from esscher.keep.rule import Ranked, as_size, blocks


@dataclass(frozen=True)
class Heavy(Ranked):
    """The ``size`` keys of largest mean softmax weight over the choosing queries at the ``last``
    positions, or over all of them.

    Queries that stand all at one place are counted in the order of their rows. ``pool``: the mean
    weight of so many neighbours counts for a key (SnapKV).
    """

    name: ClassVar[str] = "heavy"
    size: int | None = None
    last: int | None = None
    pool: int | None = None

    def __post_init__(self) -> None:
        as_size(self.size, "heavy")
        as_size(self.last, "heavy, last")
        as_size(self.pool, "heavy, pool")

    @property
    def observes(self) -> bool:
        return True

    def order(self, context: Context) -> Tensor:
        return pooled(chosen_mean(context, self.last, lambda part: part.attention), self.pool)


def chosen_mean(context: Context, last: int | None, of: Callable[[Context], Tensor]) -> Tensor:
    """Mean of a number (m, N) of each key over the choosing queries at the ``last`` positions."""
    context = context.choosing
    asked = observed(context, last)
    total = torch.zeros(context.keys, dtype=torch.float64, device=context.k.device)
    for rows, part in blocks(context):
        total += of(part)[asked[rows]].sum(0)
    return total / asked.sum()


def observed(context: Context, last: int | None) -> Tensor:
    """Queries (m,) at the last positions; where all stand at one place, the last rows."""
    places = torch.unique(context.positions)
    if last is None:
        return torch.ones_like(context.positions, dtype=torch.bool)
    if len(places) == 1:
        rows = torch.arange(len(context.positions), device=places.device)
        return rows >= len(rows) - last
    return torch.ge(context.positions, places[-min(last, len(places))])


def pooled(order: Tensor, pool: int | None) -> Tensor:
    """Of each key the mean over ``pool`` neighbours, itself in the middle; fewer at the ends."""
    if pool is None or pool == 1:
        return order
    before, after = (pool - 1) // 2, pool // 2
    along = torch.nn.functional.pad(order.cumsum(0), (1, 0))
    at = torch.arange(len(order), device=order.device)
    first, end = (at - before).clamp_min(0), (at + after + 1).clamp_max(len(order))
    return (along[end] - along[first]) / (end - first)


# ---- Impact: keys by what their loss would change behind the head, one set for all queries of a
# key-value head.


@dataclass(frozen=True)
class Impact(Ranked):
    """The ``size`` keys of largest impact over the choosing queries at the ``last`` positions, or
    over all of them.

    ``pool``: the mean impact of so many neighbours counts for a key where it is larger than its
    own: what matters comes in phrases, yet a key that matters alone must not be averaged away where
    few are kept.
    """

    name: ClassVar[str] = "impact"
    size: int | None = None
    last: int | None = None
    pool: int | None = None

    def __post_init__(self) -> None:
        as_size(self.size, "impact")
        as_size(self.last, "impact, last")
        as_size(self.pool, "impact, pool")

    @property
    def observes(self) -> bool:
        return True

    def order(self, context: Context) -> Tensor:
        squares = chosen_mean(
            context, self.last, lambda part: gain(part, behind_output=True).square()
        )
        own = squares.sqrt()
        return torch.maximum(own, pooled(own, self.pool))


# ---- KeyNorm: keys of small norm, which tend to be attended to (Devoto et al. 2024).


@dataclass(frozen=True)
class KeyNorm(Ranked):
    """The ``size`` keys of smallest norm."""

    name: ClassVar[str] = "keynorm"
    size: int | None = None

    def __post_init__(self) -> None:
        as_size(self.size, "keynorm")

    def order(self, context: Context) -> Tensor:
        return -context.k.double().square().sum(1)


# ---- TopK: the keys with the largest scores of each query; the oracle of sparse attention.


@dataclass(frozen=True)
class TopK(Ranked):
    """The ``size`` keys of largest score, for each query its own."""

    name: ClassVar[str] = "topk"
    size: int | None = None

    def __post_init__(self) -> None:
        as_size(self.size, "topk")

    @property
    def per_query(self) -> bool:
        return True

    def order(self, context: Context) -> Tensor:
        return context.scores


# ---- ExpectedAttention: keys by what a Gaussian law of future queries is expected to give them,
# times the value's norm.


@dataclass(frozen=True)
class ExpectedAttention(Ranked):
    """The ``size`` keys of largest E[e] |v|, mean and covariance of the queries taken from those
    that choose.
    """

    name: ClassVar[str] = "expected"
    size: int | None = None

    def __post_init__(self) -> None:
        as_size(self.size, "expected")

    @property
    def observes(self) -> bool:
        return True

    def order(self, context: Context) -> Tensor:
        context = context.choosing
        q, k = context.q.double() * context.scale, context.k.double()
        mean = q.mean(0)
        spread = (q - mean).T @ (q - mean) / len(q)
        exponent = k @ mean + (k @ spread * k).sum(1) / 2
        return torch.log_softmax(exponent, 0) + context.v.double().square().sum(1).log() / 2
