"""Rules by chance: each key is kept independently, with a probability of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar

import numba
import numpy as np
import torch
from torch import Tensor

from esscher.keep.context import Context
from esscher.keep.rule import Chance, refused


@dataclass(frozen=True)
class MagicPIG(Chance):
    """A key is kept if it falls into the query's bucket in at least 2 of ``tables`` tables of
    ``bits`` signs each, keys centred first.

    Signs of random projections agree with probability s = 1 - angle/pi; all bits of a table with r
    = s^bits; so that p = 1 - (1 - r)^tables - tables r (1 - r)^(tables - 1).
    """

    name: ClassVar[str] = "magicpig"
    per_query = True
    bits: int = 10
    tables: int = 150
    reweight: bool = True

    def probability(self, context: Context, rest: Tensor, wanted: Tensor | None) -> Tensor:
        k = context.k.double() - context.k.double().mean(0)
        cosine = (
            torch.nn.functional.normalize(context.q.double(), dim=1)
            @ torch.nn.functional.normalize(k, dim=1).T
        )
        same = (1 - torch.acos(cosine.clamp(-1, 1)) / math.pi) ** self.bits
        apart = (1 - same) ** (self.tables - 1)
        return (1 - apart * (1 - same) - self.tables * same * apart).clamp(0, 1)


@dataclass(frozen=True)
class Random(Chance):
    """Each of the other keys with probability ``share``; without it, with the one that makes
    queries keep n on average. ``reweight``: a kept key counts 1/share (Horvitz-Thompson).
    """

    name: ClassVar[str] = "random"
    one_for_all = True
    share: float | None = None
    reweight: bool = False

    def probability(self, context: Context, rest: Tensor, wanted: Tensor | None) -> Tensor:
        share = self.share
        if share is None:
            assert wanted is not None
            others = float(rest.sum(1).double().mean())
            share = min(max(float(wanted.mean()) / others, 0.0), 1.0) if others else 0.0
        return torch.tensor(share, dtype=torch.float64)


@dataclass(frozen=True)
class AdaptiveRest(Chance):
    """Each key of the rest with probability b/n, reweighted; b = (z sigma n / (epsilon D))^2 of
    each query, with its sigma and D from all keys, from the ``base`` sample's size up to n.
    """

    name: ClassVar[str] = "adaptive"
    per_query = True
    epsilon: float = 0.1
    delta: float = 0.1
    base: float = 0.02
    reweight: ClassVar[bool] = True  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delta >= 0.5:
            raise refused(f"adaptive, delta: expected a number below 0.5, got {self.delta!r}")

    def probability(self, context: Context, rest: Tensor, wanted: Tensor | None) -> Tensor:
        share = context.attention  # e over the whole denominator D
        count = rest.sum(1).double()
        some = count.clamp_min(1)
        mean = (share * rest).sum(1) / some
        sigma = (((share - mean[:, None]) * rest).square().sum(1) / some).sqrt()
        z = -NormalDist().inv_cdf(self.delta)
        budget = (z * sigma * count / self.epsilon).square().floor()
        # two at least: a standard deviation needs them
        least = (self.base * count).floor().clamp_min(2)
        return (torch.minimum(torch.maximum(budget, least), count) / some)[:, None]


# ---- Neyman: the chances that make the reweighted error least, to first order, at a given number
# of keys.


@dataclass(frozen=True)
class Neyman(Chance):
    """Each key with the probability that makes the error least, ``size`` keys on average; each
    query has its own, or with ``shared`` all have one set, by the queries that choose.
    """

    name: ClassVar[str] = "neyman"
    size: int | None = None
    shared: bool = False
    reweight: ClassVar[bool] = True  # type: ignore[misc]

    @property
    def per_query(self) -> bool:  # type: ignore[override]
        return not self.shared

    @property
    def observes(self) -> bool:  # type: ignore[override]
        return self.shared

    def probability(self, context: Context, rest: Tensor, wanted: Tensor | None) -> Tensor:
        if wanted is None:
            wanted = torch.full_like(rest[:, 0], self.size or 0, dtype=torch.float64)
        gains = context.gain
        if self.shared:
            inside = rest.any(0, keepdim=True)
            gains = context.choosing.gain * (rest if context.choosers is None else inside)
            gains = gains.square().mean(0, keepdim=True).sqrt()
            wanted, rest = wanted.mean(0, keepdim=True), inside
        return fill_up(gains, rest, wanted)


def fill_up(gain: Tensor, rest: Tensor, count: Tensor) -> Tensor:
    """p = min(1, lambda gain) for the ``rest`` of each row (m, N), with sum p = count (m,), or 1
    where gain > 0 if there are fewer such keys; 0 for others.
    """
    if gain.device.type == "cpu":
        chance = torch.empty_like(gain)
        _fill_up(gain.numpy(), rest.numpy(), count.numpy(), chance.numpy())
        return chance
    gain = gain * rest
    order = gain.sort(1, descending=True).values
    behind = order.flip(1).cumsum(1).flip(1)  # gain of this key and all behind it
    surely = torch.arange(gain.shape[1], dtype=gain.dtype, device=gain.device)
    # Key i is kept surely while i + behind_i / order_i, what would be kept were its own p just 1,
    # stays below the count.
    reached = torch.where(order > 0, surely + behind / order, torch.inf)
    first = torch.searchsorted(reached, count[:, None].contiguous())  # keys kept surely
    left = behind.gather(1, first.clamp(max=gain.shape[1] - 1))
    factor = torch.where(
        first < (order > 0).sum(1, keepdim=True),
        (count[:, None] - first).clamp_min(0) / left,
        torch.inf,
    )
    # 0 times infinity: never kept
    scaled = gain * factor.where(count[:, None] > 0, 0.0)
    return scaled.nan_to_num_(0.0, posinf=1.0).clamp_(max=1)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
def _fill_up(gain: Any, rest: Any, count: Any, chance: Any) -> None:
    """Newton's method for lambda, from below: the sum is concave, so that every step keeps more
    keys surely, and the last none.
    """
    for i in range(len(gain)):
        own, factor, before = chance[i], 0.0, -1.0
        for j in range(own.size):
            own[j] = gain[i, j] * rest[i, j]
        while True:
            surely, left = 0.0, 0.0
            for j in range(own.size):
                full = 1.0 if own[j] * factor >= 1 else 0.0
                surely += full
                left += own[j] * (1 - full)
            if surely == before:
                break
            before = surely
            factor = max(count[i] - surely, 0.0) / left if left > 0 else np.inf
            if factor == np.inf or factor == 0:
                break
        for j in range(own.size):
            own[j] = min(own[j] * factor, 1.0) if own[j] > 0 else 0.0
