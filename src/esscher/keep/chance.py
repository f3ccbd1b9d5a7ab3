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
from esscher.keep.rule import Chance, Scales, refused


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
    alike = True
    share: float | None = None
    reweight: bool = False

    def probability(self, context: Context, rest: Tensor, wanted: Tensor | None) -> Tensor:
        share = self.share
        if share is None:
            assert wanted is not None
            others = float(rest.sum(1).double().mean())
            share = min(max(float(wanted.mean()) / others, 0.0), 1.0) if others else 0.0
        return torch.tensor(share, dtype=torch.float64)

    def scale(self, context: Context, rest: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor] | None:
        shares = torch.stack([self.probability(context, rest, each) for each in wanted.unbind(1)])
        return torch.ones_like(rest, dtype=torch.float64), shares.to(rest.device)[None]


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
        gain, factor = self._solved(context, rest, wanted[:, None])
        return Scales(gain, factor).at(0)[0]

    def scale(self, context: Context, rest: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor] | None:
        return self._solved(context, rest, wanted)

    def _solved(self, context: Context, rest: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        gain = context.gain
        if self.shared:
            inside = rest.any(0, keepdim=True)
            gain = context.choosing.gain * (rest if context.choosers is None else inside)
            gain = gain.square().mean(0, keepdim=True).sqrt()
            wanted, rest = wanted.mean(0, keepdim=True), inside
        gain = gain * rest
        return gain, factors(gain, wanted)


def factors(gain: Tensor, count: Tensor) -> Tensor:
    """(m, S): the factor with sum min(1, factor gain) = count over each row of ``gain`` (m, N), for
    counts (m, S); infinite where no more keys have a gain.
    """
    if gain.device.type == "cpu":
        found = torch.empty(count.shape, dtype=gain.dtype)
        _newton(gain.numpy(), count.numpy(), found.numpy())
        return found
    order = gain.sort(1, descending=True).values
    behind = order.flip(1).cumsum(1).flip(1)  # gain of this key and all behind it
    surely = torch.arange(gain.shape[1], dtype=gain.dtype, device=gain.device)
    # Key i is kept surely while i + behind_i / order_i, what would be kept were its own p just 1,
    # stays below the count.
    reached = torch.where(order > 0, surely + behind / order, torch.inf)
    first = torch.searchsorted(reached, count.contiguous())  # keys kept surely
    left = behind.gather(1, first.clamp(max=gain.shape[1] - 1))
    some = first < (order > 0).sum(1, keepdim=True)
    factor = torch.where(some, (count - first).clamp_min(0) / left, torch.inf)
    return factor.where(count > 0, 0.0)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
def _newton(gain: Any, count: Any, found: Any) -> None:
    """Newton's method from below: the sum is concave, so that every step keeps more keys surely,
    and the last none.
    """
    for i in range(len(gain)):
        own = gain[i]
        for s in range(count.shape[1]):
            factor, before = 0.0, -1.0
            if s and count[i, s - 1] <= count[i, s]:
                factor = found[i, s - 1]
            while 0 <= factor < np.inf and count[i, s] > 0:
                surely, left = 0.0, 0.0
                for j in range(own.size):
                    full = 1.0 if own[j] * factor >= 1 else 0.0
                    surely += full
                    left += own[j] * (1 - full)
                if surely == before:
                    break
                before = surely
                factor = max(count[i, s] - surely, 0.0) / left if left > 0 else np.inf
                if factor == 0:
                    break
            found[i, s] = factor
