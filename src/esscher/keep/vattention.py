"""AdaptiveRest: of the keys that nothing keeps surely, as many as (epsilon, delta) ask for; and
vAttention, which has it.

The rest's sum of e = exp(score) is estimated from b keys, each counted n/b times, n the number of
keys in the rest. Were the estimate normal, its relative error would exceed epsilon on one side with
probability delta at

    b = (z sigma n / (epsilon D))^2,        z = the normal quantile of 1 - delta,

sigma the standard deviation of e over the rest and D the whole denominator, sure keys included.
vAttention takes sigma and D from a base sample, a share ``base`` of the rest, and never fewer keys
than that; at most it takes n (Desai et al. 2025, arXiv 2510.05688, and its code, which has the
quantile of 1 - delta). The guarantee is one-sided, asymptotic, and on the denominator alone:
es.coverage gives the true probability.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

import torch
from torch import Tensor

from esscher.keep.context import Context
from esscher.keep.recent import Recent
from esscher.keep.rule import Chance, Union
from esscher.keep.sinks import Sinks
from esscher.keep.sizes import as_between
from esscher.keep.topk import TopK

__all__ = ["AdaptiveRest", "VAttention"]


@dataclass(frozen=True)
class AdaptiveRest(Chance):
    """Each key of the rest with probability b/n, reweighted; b of each query from its own sigma and
    D.

    As a keep rule it knows sigma and D from all keys, and keys are kept independently, so that the
    integral applies. ``base`` 0: no base sample, also in ``coverage``.
    """

    name: ClassVar[str] = "adaptive"
    epsilon: float = 0.1
    delta: float = 0.1
    base: float = 0.02
    reweight: ClassVar[bool] = True  # type: ignore[misc]

    @property
    def per_query(self) -> bool:
        return True

    def __post_init__(self) -> None:
        as_between(self.epsilon, "adaptive, epsilon", 0, 1)
        as_between(self.delta, "adaptive, delta", 0, 0.5)
        if self.base != 0:
            as_between(self.base, "adaptive, base", 0, 1)

    def base_size(self, rest: Tensor) -> Tensor:
        """Keys of the base sample; two at least, where there is one: a standard deviation needs
        them.
        """
        return (
            torch.minimum(rest, (self.base * rest).floor().clamp_min(2))
            if self.base
            else torch.zeros_like(rest)
        )

    def budget(self, sigma: Tensor, total: Tensor, rest: Tensor) -> Tensor:
        """b, a whole number: from the base sample's size, and from 1, to ``rest``, the keys there
        are.
        """
        z = -NormalDist().inv_cdf(self.delta)
        wanted = (z * sigma * rest / (self.epsilon * total)).square().floor().clamp_min(1)
        return torch.minimum(torch.maximum(wanted, self.base_size(rest)), rest)

    def probability(self, context: Context, rest: Tensor, wanted: Tensor | None) -> Tensor:
        share = context.attention  # e over the whole denominator
        count = rest.sum(1).double()
        some = count.clamp_min(1)
        mean = (share * rest).sum(1) / some
        sigma = (((share - mean[:, None]) * rest).square().sum(1) / some).sqrt()
        return rest * (self.budget(sigma, torch.ones_like(sigma), count) / some)[:, None]


def VAttention(
    epsilon: float = 0.1,
    delta: float = 0.1,
    sinks: int = 4,
    recent: int = 64,
    topk: int | None = None,
    base: float = 0.02,
) -> Union:
    """The first keys, the last, those of largest score, and of the rest what (epsilon, delta) ask
    for (Desai et al. 2025).
    """
    return Sinks(sinks) | Recent(recent) | TopK(topk) | AdaptiveRest(epsilon, delta, base)
