"""Heads whose scores span more than a score grid: measured key by key, where all their keys are held."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esscher.convergence.grid import state as deposit
from esscher.convergence.grid.state import Deposit, Grid
from esscher.diagnostics.scores import SoftmaxStatistics

__all__ = ["Held", "add_keys_or_hold"]

ELEMENTS = 2**22  # scores computed at once
GRID = Grid(1 / 8, 4, 1e-6)  # for the shape of scores
WIDEST = 0.9 * deposit.MAX_CELLS * GRID.spacing


@dataclass(frozen=True)
class Held:
    """Queries (m, k) and all keys (N, k) and values (N, d_v) of a head; scores are scale <q, k>."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float

    @property
    def keys(self) -> Tensor:
        """(m,): how many each query sees."""
        return torch.full((len(self.q),), len(self.k), dtype=torch.int64)

    @property
    def mean_keys(self) -> int:
        return len(self.k)

    def only(self, rows: Tensor) -> Held:
        """The same for some of the queries."""
        return replace(self, q=self.q[rows.to(self.q.device)])

    def softmax(self) -> SoftmaxStatistics:
        """From the scores themselves, measured from each query's largest: no sum of them overflows or cancels."""
        parts = []
        for scores in self._scores():
            top = scores.amax(1, keepdim=True)
            below = scores - top
            log_sum = below.logsumexp(1)
            p = (below - log_sum[:, None]).exp()
            entropy = (log_sum - (p * below).sum(1)).clamp_min(0)
            shifted = below.mean(1), below.std(1, correction=0)
            parts.append((log_sum + top[:, 0], 1 / p.square().sum(1), entropy, shifted[0] + top[:, 0], shifted[1]))
        return SoftmaxStatistics(*(torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)))

    def masses(self) -> Deposit:
        """Deposits of the keys without their values, of scores divided by a number that brings them onto the grid."""
        span = max(float((scores.amax(1) - scores.amin(1)).max()) for scores in self._scores())
        unit = 2.0 ** max(0, math.ceil(math.log2(span / WIDEST))) if span > 0 else 1.0
        parts = []
        for scores in self._scores():
            # measured from the mean, so that cell numbers are small
            state = deposit.init(len(scores), GRID, torch.zeros(0, device=scores.device))
            near = (scores - scores.mean(1, keepdim=True)) / unit
            parts.append(deposit.update(state, near, self.v[:, :0]))
        return deposit.stack(parts)

    def _scores(self) -> Iterator[Tensor]:
        """In float64, some queries at a time."""
        for rows in torch.split(self.q, max(1, ELEMENTS // len(self.k))):
            yield (rows * self.scale).double() @ self.k.double().T


def add_keys_or_hold(state: Deposit | Held, scores: Tensor, values: Tensor, pool: Held | None) -> Deposit | Held:
    """The deposits after a block of keys, or the pool of all keys where there is one and the scores are too wide."""
    if isinstance(state, Held):
        return state
    extent = deposit.reach(state, scores)
    if pool is not None and (extent.cells > deposit.MAX_CELLS or not extent.largest < deposit.FAR):
        return pool
    return deposit.update(state, scores, values, extent=extent, owned=True)
