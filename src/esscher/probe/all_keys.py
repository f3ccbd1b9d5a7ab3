"""All keys of some queries: the exact path for heads whose scores span more than a score grid."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from esscher.errors import grid as deposit
from esscher.errors.curve import QueryErrors, concatenate, side_by_side
from esscher.errors.grid import Deposit, Grid
from esscher.errors.keep_curve import KeepErrors
from esscher.errors.nodes import error_of_share
from esscher.errors.pool_curve import pool_errors
from esscher.hf.call import score
from esscher.keep.context import Context
from esscher.tails.scores import SoftmaxStatistics

ELEMENTS = 2**22  # scores computed at once


@dataclass(frozen=True)
class AllKeys:
    """Queries (m, k) and all keys (N, k) and values (N, d_v) of a head; scores are ``factor`` times
    those of the model.

    ``sink``: a logit of each query that is in the softmax without a key. Draws take it for one more
    key of value 0; where keys are kept or dropped, it is always kept.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    bias: Tensor | None = None  # (m, N)
    seen: Tensor | None = None  # (m, N): which keys each query sees; None: all
    softcap: float | None = None
    sink: Tensor | None = None  # (m,)
    factor: float = 1.0

    @property
    def keys(self) -> Tensor:
        """(m,): how many each query sees."""
        if self.seen is not None:
            return self.seen.sum(1).cpu()
        return torch.full((len(self.q),), len(self.k), dtype=torch.int64)

    def only(self, rows: Tensor) -> AllKeys:
        """The same for some of the queries."""
        rows = rows.to(self.q.device)
        bias, seen, sink = (
            None if x is None else x[rows] for x in (self.bias, self.seen, self.sink)
        )
        return replace(self, q=self.q[rows], bias=bias, seen=seen, sink=sink)

    def errors(self, n: npt.NDArray[np.int64], sampling: str, of: int) -> QueryErrors:
        """Of n keys drawn with replacement, or of keys kept with probability n / of."""
        if self.bias is None and self.seen is None:
            return pool_errors(self.q, self.k, self.v, n, sampling, self.factor * self.scale)
        if self.sink is not None and sampling == "bernoulli":
            return self._kept_beside_sink(n / of)
        parts, values = [], self._values
        for row in self.rows():  # each query has keys of its own
            own = row > -torch.inf
            parts.append(error_of_share(row[own][None], values[own], n, of, sampling))
        return concatenate(parts)

    def _kept_beside_sink(self, shares: npt.NDArray[np.float64]) -> QueryErrors:
        """Of keys kept with these probabilities; derivatives are not known."""
        assert self.seen is not None
        logits = torch.stack(list(replace(self, sink=None).rows())).masked_fill(~self.seen, 0.0)
        last = torch.full((len(self.q),), len(self.k) - 1, device=self.q.device)
        context = Context(
            self.q, self.k, self.v, self.scale, last, self.seen, logits, sink=self.sink
        )
        errors = KeepErrors(context)
        found = side_by_side([errors.share(min(1.0, share)) for share in shares.tolist()])
        limit = context.limit.cpu().numpy()
        return replace(found, limit=limit, dmse_dlogn=np.full_like(found.mse, np.nan))

    @property
    def _values(self) -> Tensor:
        """(N, d_v), or with that of a sink logit (N + 1, d_v)."""
        return self.v if self.sink is None else pad(self.v, (0, 0, 0, 1))

    def softmax(self) -> SoftmaxStatistics:
        """From the scores themselves, measured from each query's largest: no sum of them overflows
        or cancels.
        """
        parts = []
        for scores in self.scores():
            top = scores.amax(1, keepdim=True)
            seen = scores > -torch.inf
            below = torch.where(seen, scores - top, 0.0)
            log_sum = torch.where(seen, below, -torch.inf).logsumexp(1)
            p = torch.where(seen, (below - log_sum[:, None]).exp(), 0.0)
            entropy = (log_sum - (p * below).sum(1)).clamp_min(0)
            count = seen.sum(1)
            mean = below.sum(1) / count
            sd = (torch.where(seen, below - mean[:, None], 0.0).square().sum(1) / count).sqrt()
            parts.append(
                (log_sum + top[:, 0], 1 / p.square().sum(1), entropy, mean + top[:, 0], sd)
            )
        columns = zip(*parts, strict=True)
        return SoftmaxStatistics(*(torch.cat(column).cpu().numpy() for column in columns))

    def masses(self, grid: Grid) -> Deposit:
        """Deposits of the keys without their values, of scores divided by a number that brings them
        onto the grid.
        """
        widest, span = 0.9 * deposit.MAX_CELLS * grid.spacing, 0.0
        for scores in self.scores():
            low = torch.where(scores > -torch.inf, scores, torch.inf).amin(1)
            span = max(span, float((scores.amax(1) - low).max()))
        unit = 2.0 ** max(0, math.ceil(math.log2(span / widest))) if span > 0 else 1.0
        parts = []
        for scores in self.scores():
            # measured from the mean, so that cell numbers are small
            state = deposit.init(len(scores), grid, torch.zeros(0, device=scores.device))
            seen = scores > -torch.inf
            mean = torch.where(seen, scores, 0.0).sum(1, keepdim=True) / seen.sum(1, keepdim=True)
            parts.append(deposit.update(state, (scores - mean) / unit, self._values[:, :0]))
        return deposit.stack(parts)

    def scores(self) -> Iterator[Tensor]:
        """In float64, some queries at a time; -inf for keys that a query does not see. A sink logit
        comes last.
        """
        every = torch.arange(len(self.q), device=self.q.device)
        for rows in torch.split(every, max(1, ELEMENTS // len(self.k))):
            some = self.only(rows)
            scores = score(
                some.q.double(), self.k.double(), self.scale, self.softcap, some.bias, some.seen
            )
            if some.sink is not None:
                scores = torch.cat([scores, some.sink[:, None]], 1)
            yield self.factor * scores

    def rows(self) -> Iterator[Tensor]:
        """The scores of one query after the other."""
        for scores in self.scores():
            yield from scores


def add_keys(
    state: Deposit | AllKeys, scores: Tensor, values: Tensor, pool: AllKeys | None
) -> Deposit | AllKeys:
    """The deposits after a block of keys, or all keys where they are held and the scores are too
    wide for a grid.
    """
    if isinstance(state, AllKeys):
        return state
    extent = deposit.reach(state, scores)
    if pool is not None and (extent.cells > deposit.MAX_CELLS or not extent.largest < deposit.FAR):
        return pool
    return deposit.update(state, scores, values, extent=extent, owned=True)
