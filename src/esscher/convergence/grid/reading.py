"""Deposits read back: the sums over keys that the integrals ask for, as products of kernels and
cells.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from esscher.convergence.grid.bspline import coarsen, exponential_gain
from esscher.convergence.grid.kernels import Cells, kernels
from esscher.convergence.integral.formulas import Family, Moments, Sums, Vectors

__all__ = ["DepositSource"]

# of a sum over keys, relative to the sum of absolute terms
ROUNDING = 16 * torch.finfo(torch.float64).eps


class DepositSource:
    """A source (see convergence.integral.formulas) over the cells of a deposit; anchored at the end
    of each query's grid.

    The limit and all moments are those of the deposited measure itself, so that E[e c] = 0 holds to
    rounding: what the grid gets wrong is relative to |c|, even where one key takes nearly all the
    weight and its c nearly vanishes.
    """

    chunk = 32

    def __init__(
        self,
        cells: Tensor,
        spacing: float,
        points: int,
        center: Tensor,
        single: bool,
        drift: Tensor | None = None,
    ) -> None:
        """``drift``: the limit minus the centre, (m, d), where it is not that of these deposits."""
        self.cells, self.spacing, self.points, self.center, self.single = (
            cells,
            spacing,
            points,
            center,
            single,
        )
        if drift is not None:
            self.drift = drift
        self.span = cells.shape[2] * spacing
        self.grid = Cells(points, spacing, single, cells.device)
        # without itself: large tensors must not wait for the collector of cycles
        self._coarser: dict[int, DepositSource] = {}

    def coarser(self, times: int) -> DepositSource:
        """The source over the same deposits with the spacing doubled so many times."""
        if times == 0:
            return self
        if times not in self._coarser:
            finer = self.coarser(times - 1)
            cells = coarsen(finer.cells, self.points)
            self._coarser[times] = DepositSource(
                cells,
                2 * finer.spacing,
                self.points,
                self.center,
                self.single,
                self.__dict__.get("drift"),
            )
        return self._coarser[times]

    @cached_property
    def moments(self) -> Moments:
        first, pair = self._exponential(1.0), self._exponential(2.0)
        return Moments(
            limit=self.center + self.drift,
            mean=self.cells[:-2].sum(2).T / self.total - self.drift,
            variance=self.spread.sum(1).clamp_min(0),
            log_first=(self.mass @ first).log(),
            log_pair=(self.mass @ pair).log(),
            log_spread=(self.spread @ pair).clamp_min(0).log(),
        )

    @cached_property
    def total(self) -> Tensor:
        """Weight of all keys, (m, 1)."""
        return self.cells[-2].sum(1, keepdim=True)

    @cached_property
    def mass(self) -> Tensor:
        """Deposits of 1 under the law of a key, (m, L)."""
        return self.cells[-2] / self.total

    @cached_property
    def drift(self) -> Tensor:
        """Limit minus centre, (m, d)."""
        first = self._exponential(1.0)
        return (self.cells[:-2] @ first).T / (self.cells[-2] @ first)[:, None]

    @cached_property
    def spread(self) -> Tensor:
        """Deposits of |c|^2 + b, (m, L); what rounding leaves below 0 is 0."""
        along = torch.einsum("md,dml->ml", self.drift, self.cells[:-2])
        square = (
            self.cells[-1] - 2 * along + self.drift.square().sum(1, keepdim=True) * self.cells[-2]
        )
        return square.clamp_min(0) / self.total

    @cached_property
    def rounding(self) -> Tensor:
        """Bounds on the rounding of the mean squared error at n = 1 and, times n, as n grows: (2,
        m).

        |c|^2 is the difference of numbers of the size of |value - centre|^2 and |drift|^2. Where
        one key has nearly all the weight its c nearly vanishes, and what is left of it is rounding.
        """
        size = (
            self.cells[-1] + self.drift.square().sum(1, keepdim=True) * self.cells[-2]
        ) / self.total
        first, pair = self._exponential(1.0), self._exponential(2.0)
        return ROUNDING * torch.stack([size.sum(1), (size @ pair) / (self.mass @ first).square()])

    @cached_property
    def value(self) -> Tensor:
        """Deposits of c, (d, m, L): rounded to float32 when the values themselves are known no
        better.
        """
        size = self.total * self.unit
        value = torch.empty_like(
            self.cells[:-2], dtype=torch.float32 if self.single else torch.float64
        )
        # one coordinate stays in the cache
        for own, cells, drift in zip(value, self.cells, self.drift.T, strict=False):
            own.copy_(torch.addcmul(cells, drift[:, None], self.cells[-2], value=-1).div_(size))
        return value

    @cached_property
    def unit(self) -> float:
        """The size of the values, a power of 2 taken out of them: float32 has few small numbers."""
        size = math.sqrt(float((self.cells[-1].sum(1) / self.total[:, 0]).max()))
        return 2.0 ** math.frexp(size)[1] if size > 0 else 1.0

    def contract(self, tau: Tensor, family: Family) -> Sums:
        numbers, vectors = {}, {}
        for name, kernel in kernels(family, self.grid, self.cells.shape[2], tau).items():
            if kernel.channel == "value":
                vectors[name] = Vectors(self.value @ kernel.weights, kernel.peak * self.unit)
            else:
                numbers[name] = (
                    self.mass if kernel.channel == "mass" else self.spread
                ) @ kernel.weights
        return Sums(numbers, vectors)

    def _exponential(self, rate: float) -> Tensor:
        """Coefficients of exp(rate u), which are exact."""
        return torch.exp(rate * self.grid.centres(self.cells.shape[2])) / exponential_gain(
            self.points, rate * self.spacing
        )
