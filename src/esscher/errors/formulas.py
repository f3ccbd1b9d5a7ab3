"""The Laplace integrals that give the exact error at n tokens, by a trapezoid rule in tau = log t.

One query; keys come from a law with weights w_j; e_j = exp(score), c_j = value - limit, b_j =
variance of the value given the key. 1/S^2 = int t exp(-tS) dt over t > 0 turns the softmax's
denominator S into a product over keys. Drawing n keys, with phi(t) = E exp(-te),

    E||Gamma_n - Gamma||^2 = n int t E[e^2 (|c|^2 + b) exp(-te)] phi^(n-1) dt
                             + n (n-1) int t |E[e c exp(-te)]|^2 phi^(n-2) dt
    E Gamma_n - Gamma      = n int E[e c exp(-te)] phi^(n-1) dt
    E sum_j p_j^2          = n int t E[e^2 exp(-te)] phi^(n-1) dt

Keeping each of N keys with probability f, D_j = 1 - f + f exp(-t e_j), P = prod_j D_j, w_j = f e_j
exp(-t e_j) / D_j:

    E||Gamma_f - Gamma||^2 = int t P ( sum_j f (1-f) e_j^2 exp(-t e_j) / D_j^2 |c_j|^2 + |sum_j
        w_j c_j|^2 ) dt

where no kept key counts as no error (its S is 0). Every functional is a sum over keys of a kernel
of u = tau + score.

Both integrands are E[|sum e c|^2 t^2 exp(-tS)] dtau, an average of positive bumps of one shape. Two
rigorous statements follow: the trapezoid rule of step H is wrong by a relative 2 sum_k |Gamma(2 + 2
pi i k / H)| at most (Poisson summation), and the parts cut off at both ends have the bounds that
stop the march below.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.errors.curve import QueryErrors

Floats = npt.NDArray[np.float64]
# (u, tau) -> name: (channel, kernel)
Family = Callable[[Tensor, Tensor], dict[str, tuple[str, Tensor]]]

HIGHEST = 6.5  # exp(-exp(6.5)) = 1e-289: larger u change nothing, and smaller numbers are slow
TINY = 1e-300
APART = 2**12  # numbers of one coordinate from which its own pass is worth its start


@dataclass(frozen=True)
class Moments:
    """What the pool is as n grows without end; e measured from the anchor."""

    limit: Tensor  # Gamma, (m, d)
    mean: Tensor  # E c, (m, d)
    variance: Tensor  # E(|c|^2 + b), (m,)
    log_first: Tensor  # log E e, (m,)
    log_pair: Tensor  # log E e^2, (m,)
    log_spread: Tensor  # log E[e^2 (|c|^2 + b)], (m,)
    missing: Tensor | float = 0.0  # share of tokens that are not kept: e = 0

    @property
    def delta(self) -> Tensor:
        """lim n * MSE = E[e^2 (|c|^2 + b)] / (E e)^2."""
        return torch.exp(self.log_spread - 2 * self.log_first)


@dataclass(frozen=True)
class Vectors:
    """Sums of the channel "value": ``sums`` (d, m, nodes) in the type they were summed in, times
    ``factor`` (nodes).
    """

    sums: Tensor
    factor: Tensor | float

    def dot(self, other: Vectors) -> Tensor:
        """Inner products of both at each query and node, (m, nodes), in float64.

        Coordinate by coordinate where that is many numbers: the products stay in the cache, 4 times
        faster than a float64 copy of all sums (512 queries, 32 nodes and coordinates).
        """
        if self.sums[0].numel() < APART:
            out = (self.sums.double() * other.sums).sum(0)
        else:
            out = torch.zeros_like(self.sums[0], dtype=torch.float64)
            for a, b in zip(self.sums, other.sums, strict=True):
                out.addcmul_(a.double(), b.double())
        return out * (self.factor * other.factor)

    def along(self, power: Tensor) -> Tensor:
        """Sums over nodes times ``power`` (m, nodes, n): (m, d, n)."""
        return (self.sums.transpose(0, 1).double() * self.factor) @ power


@dataclass(frozen=True)
class Sums:
    """What a source gives for one family of kernels: numbers (m, nodes) and vectors, under the
    names of the kernels.
    """

    numbers: dict[str, Tensor]
    vectors: dict[str, Vectors]

    def __getitem__(self, name: str) -> Tensor:
        return self.numbers[name]


@runtime_checkable
class Reach(Protocol):
    """What the march over nodes must know; scores are measured from an anchor that no score of the
    query exceeds.
    """

    @property
    def span(self) -> float:
        """No score lies further below the anchor."""
        ...

    @property
    def chunk(self) -> int:
        """Nodes to ask for at once, between two looks at the tails."""
        ...


@runtime_checkable
class Source(Reach, Protocol):
    """A weighted pool seen from m queries."""

    @property
    def moments(self) -> Moments: ...

    def contract(self, tau: Tensor, family: Family) -> Sums:
        """E[kernel(tau + score) x channel] for each kernel of the family, on nodes ``tau``.

        Channels "mass" 1 and "spread" |c|^2 + b give numbers; "value" c gives vectors.
        """
        ...


@dataclass(frozen=True)
class NodeErrors:
    """What the integrals give for each query and n; arrays as in QueryErrors."""

    mse: Floats
    sum_p2: Floats
    dmse_dlogn: Floats  # n d mse / d n; at n = N of bernoulli_errors the mse is 0 and this is nan
    limit: Floats
    delta: Floats
    bias: Floats | None
    # bound or estimate of the relative error of sqrt(mse), rounding of the inputs apart
    accuracy: float
    interpolation: float = 0.0  # of the mse, the part of it that comes from a score grid

    def queries(self) -> QueryErrors:
        return QueryErrors(
            mse=self.mse, sum_p2=self.sum_p2, limit=self.limit, delta=self.delta, bias=self.bias
        )


def aliasing(step: float) -> float:
    """2 sum_k |Gamma(2 + i y_k)|, y_k = 2 pi k / step, |Gamma(2 + iy)|^2 = (1 + y^2) pi y / sinh(pi
    y).
    """
    total = 0.0
    for k in (1, 2, 3):
        y = 2 * math.pi * k / step
        if y < 200:
            total += 2 * math.sqrt((1 + y * y) * math.pi * y / math.sinh(math.pi * y))
    return total


def step_for(tol: float) -> float:
    """The longest step, in hundredths, whose aliasing is at most ``tol``."""
    return next(step / 100 for step in range(70, 9, -1) if aliasing(step / 100) <= tol)


@runtime_checkable
class Integral(Protocol):
    """Sums over nodes tau, and bounds on what lies outside them; rows are the mean squared error
    and E sum_j p_j^2.
    """

    def add(self, tau: Tensor) -> None: ...

    def found(self) -> Tensor: ...

    def above(self, tau: float) -> Tensor:
        """Bound on what the nodes above tau, the last one added upward, would add."""
        ...

    def below(self, tau: float) -> Tensor: ...


def march(
    reach: Reach, integral: Integral, start: float, lowest: float, step: float, tol: float
) -> None:
    """Add lattice nodes upward from ``start``, then downward, until what is cut off is below
    ``tol`` of what is found.

    Whatever the bounds say, nothing is left below ``lowest``, nor where t e > exp(4) for every key.
    """
    highest = reach.span + 4
    chunk, device = reach.chunk, integral.found().device

    def add(first: int) -> None:
        integral.add(step * torch.arange(first, first + chunk, dtype=torch.float64, device=device))

    def negligible(rest: Tensor) -> bool:
        return bool((rest <= tol * integral.found() + TINY).all())

    origin = math.floor(min(start, highest) / step)
    index = origin
    while True:
        add(index)
        index += chunk
        last = step * (index - 1)
        if last > highest or negligible(integral.above(last)):
            break
    index = origin
    while step * index > lowest and not negligible(integral.below(step * index)):
        index -= chunk
        add(index)


def as_numpy(x: Tensor) -> Floats:
    out: Floats = x.detach().cpu().numpy()
    return out
