"""The exact error of attention on the keys that a rule keeps, for a ladder of sizes. Formulas: integral.inclusion.

Three roads, by what a rule leaves to chance. Nothing: the softmax over what is kept. One probability for all keys it does not
keep surely: one deposit of these on score grids serves every probability (integral.sure_and_rest). Probabilities of their own:
key by key.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esscher.convergence.curve import ErrorCurve, QueryErrors
from esscher.convergence.grid import state as deposit
from esscher.convergence.grid.reading import DepositSource
from esscher.convergence.integral.formulas import step_for
from esscher.convergence.integral.inclusion import InclusionErrors, SureKeys, inclusion_error, joined
from esscher.convergence.integral.sure_and_rest import sure_and_rest_error
from esscher.inputs import as_counts
from esscher.keep.context import Context
from esscher.keep.rule import Inclusion, Rule

__all__ = ["keep_curve"]

FEW_PAIRS = 2**14  # queries x keys up to which the sum key by key is as fast as the grid
BLOCK = 8192  # keys deposited at once
SHARP = 0.999


def keep_curve(context: Context, rule: Rule, n: Any = None, *, details: bool = False) -> ErrorCurve:
    """Root mean square over the queries of the context; ``n``: keys kept in all, for the part without a number.

    A rule whose numbers are all given has one point, at the keys it keeps on average.
    """
    counts = [None] if n is None else as_counts(n, "n").tolist()
    errors = _Errors(context)
    found, sizes = [], []
    for count in counts:
        kept = rule.include(context, count)
        found.append(errors.of(kept))
        sizes.append(kept.size.cpu().numpy())
    queries = QueryErrors(
        mse=np.stack([part.mse.cpu().numpy() for part in found], axis=1),
        sum_p2=np.stack([part.sum_p2.cpu().numpy() for part in found], axis=1),
        limit=context.limit.cpu().numpy(),
        delta=np.full(len(context.q), np.nan),
        bias=np.stack([part.bias.cpu().numpy() for part in found], axis=1) if details else None,
    )
    size = np.stack(sizes, axis=1)
    ladder = np.asarray([max(1, round(float(size.mean())))] if n is None else counts, dtype=np.int64)
    return ErrorCurve.from_queries(
        ladder,
        queries,
        None,
        kind="exact",
        accuracy=max(part.accuracy for part in found),
        origin=f"exact error on the keys that {rule} keeps of {context.keys}",
        kept=size.mean(axis=0),
    )


class _Errors:
    """The errors of inclusions of one context; the deposit of what is not kept surely stays for the next of them.

    Queries go key by key whose largest weight is above SHARP (that key's c nearly vanishes, and a grid of sums has no digits
    left for it) or whose scores span more than a grid.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.grid = deposit.choose_grid(context.dtype, "bernoulli")
        lowest = torch.where(context.visible, context.scores, torch.inf).amin(1)
        wide = context.scores.amax(1) - lowest > 0.9 * deposit.MAX_CELLS * self.grid.spacing
        self.blunt = (~wide & (context.attention.amax(1) <= SHARP)).nonzero()[:, 0]
        whole = len(self.blunt) == len(context.q)
        self.near = context if whole else context.take(self.blunt)
        self._last: tuple[Tensor, _Rest | None] | None = None

    def of(self, kept: Inclusion) -> InclusionErrors:
        context, share = self.context, kept.share
        large = share is not None and context.scores.numel() > FEW_PAIRS and len(self.blunt) > 0
        rest = self._rest(kept.sure[self.blunt]) if large else None
        if rest is None or share is None:
            return inclusion_error(context.scores, context.v, kept.probability, kept.weight)
        found = rest.errors(share, reweight=kept.weight is not None)
        if len(self.blunt) == len(context.q):
            return found
        sharp = torch.ones(len(context.q), dtype=torch.bool, device=self.blunt.device)
        sharp[self.blunt] = False
        weight = None if kept.weight is None else kept.weight[sharp]
        others = inclusion_error(context.scores[sharp], context.v, kept.probability[sharp], weight)
        order = torch.cat([self.blunt, sharp.nonzero()[:, 0]]).argsort()
        return joined([found, others], order)

    def _rest(self, sure: Tensor) -> _Rest | None:
        if self._last is None or not torch.equal(self._last[0], sure):
            self._last = sure, _Rest.deposited(self.near, sure, self.grid)
        return self._last[1]


class _Rest:
    """Deposits of the keys that are not kept surely, and the sums over those that are."""

    def __init__(self, state: deposit.Deposit, sure: SureKeys, drift: Tensor, rounding: float) -> None:
        self.state, self.sure, self.rounding = state, sure, rounding
        grid = state.grid
        self.source = DepositSource(state.cells, grid.spacing, grid.points, state.center, grid.tol > 1e-8, drift)

    @classmethod
    def deposited(cls, context: Context, sure: Tensor, grid: deposit.Grid) -> _Rest | None:
        """None where a query keeps all its keys surely, or one so far above the others that they have no weight."""
        others = context.visible & ~sure
        if not bool(others.any(1).all()):
            return None
        near = context.v.double() - context.v[len(context.v) // 2].double()
        drift = context.attention @ near
        state = deposit.init(len(others), grid, torch.zeros_like(near[0]))
        scores = context.scores.masked_fill(~others, -torch.inf)
        for start in range(0, context.keys, BLOCK):
            part = slice(start, start + BLOCK)
            state = deposit.update(state, scores[:, part], near[part], owned=True)
        anchor = (state.end.double() * grid.spacing)[:, None]
        held = SureKeys.of(sure, context.scores - anchor, near, drift, context.distance)
        if not bool(torch.isfinite(held.pair).all()):
            return None
        longest = float(context.scores[context.visible].abs().max())
        return cls(state, held, drift, torch.finfo(context.dtype).eps * (1 + longest))

    def errors(self, share: float, reweight: bool) -> InclusionErrors:
        grid = self.state.grid
        source = self.source.coarser(deposit.level_for(grid, share))
        found = sure_and_rest_error(source, self.state.keys, self.sure, share, reweight, step=step_for(grid.tol), tol=grid.tol)
        return replace(found, accuracy=found.accuracy + grid.tol + self.rounding)
