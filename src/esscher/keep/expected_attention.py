"""ExpectedAttention: keys by what a Gaussian law of future queries is expected to give them, times
the value's norm.

With queries ~ N(mu, S), E exp(scale <q, k>) = exp(scale <mu, k> + scale^2 k'Sk / 2): the Laplace
transform of the law of queries at the key. E[e/Z] is taken for E[e] / E[Z], and |v| for |v -
limit|, as in kvpress; the rule only ranks. One law is fitted to all rows; kvpress has one for each
query head, and averages what they expect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esscher.keep.context import Context
from esscher.keep.rule import Ranked
from esscher.keep.sizes import as_size

__all__ = ["ExpectedAttention"]


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
