"""The exact error of attention on the keys that a rule keeps, for a ladder of sizes. Formulas:
integral.inclusion.

Four roads, by what a rule leaves to chance. Nothing: sums over a ranking (integral.ranked). One
probability for all keys it does not keep surely: one deposit of these on score grids serves every
probability (integral.sure_and_rest). Probabilities of their own: key by key, of float32 inputs by
compiled sums (integral.doubling).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.errors import grid as deposit
from esscher.errors.bernoulli import sure_and_rest_error
from esscher.errors.curve import ErrorCurve, QueryErrors
from esscher.errors.doubling import doubling_errors
from esscher.errors.formulas import step_for
from esscher.errors.grid import DepositSource
from esscher.errors.inclusion import (
    TOL,
    InclusionErrors,
    SureKeys,
    inclusion_error,
    joined,
    ranked_errors,
)
from esscher.inputs import as_counts, generator_for
from esscher.keep import LowRank
from esscher.keep.chance import Random, share_of
from esscher.keep.context import Context
from esscher.keep.rule import Chance, Inclusion, Ranked, Rule, ranking, refused

FEW_PAIRS = 2**12  # queries x keys up to which the sum key by key is as fast as the others
BLOCK = 8192  # keys deposited at once
SHARP = 0.999
SINGLE = 1e-6  # tolerance of integrals over float32 inputs


def keep_curve(context: Context, rule: Rule, n: Any = None, *, details: bool = False) -> ErrorCurve:
    """Root mean square over the queries of the context; ``n``: keys kept in all, for the part
    without a number.

    A rule whose numbers are all given has one point, at the keys it keeps on average.
    """
    return KeepErrors(context).curve(rule, n, details=details)


class KeepErrors:
    """The errors of rules on one context; what several of them need is found once.

    Of a restricted context a rule sees and counts the keys of the cache (``asked``); the others are
    all kept, and errors are those on all keys (``context``).
    """

    def __init__(self, context: Context) -> None:
        self.asked = context  # what rules see
        self.context = context.whole  # what sums are over: a sink logit is a sure key of value 0
        self._last: tuple[Tensor, _Rest | None] | None = None

    def curve(self, rule: Rule, n: Any = None, *, details: bool = False) -> ErrorCurve:
        """As ``keep_curve``."""
        context = self.asked
        counts = [None] if n is None else as_counts(n, "n").tolist()
        found, sizes = self._found(rule, counts)
        queries = QueryErrors(
            mse=np.stack([part.mse.cpu().numpy() for part in found], axis=1),
            sum_p2=np.stack([part.sum_p2.cpu().numpy() for part in found], axis=1),
            limit=context.limit.cpu().numpy(),
            delta=np.full(len(context.q), np.nan),
            bias=np.stack([part.bias.cpu().numpy() for part in found], axis=1) if details else None,
        )
        size = torch.stack(sizes, dim=1).cpu().numpy()
        ladder = np.asarray(
            [max(1, round(float(size.mean())))] if n is None else counts, dtype=np.int64
        )
        return ErrorCurve.from_queries(
            ladder,
            queries,
            None,
            kind="exact",
            accuracy=max(part.accuracy for part in found),
            origin=f"exact error on the keys that {rule} keeps of {self.asked.keys}",
            kept=size.mean(axis=0),
        )

    def _found(
        self, rule: Rule, counts: Sequence[int | None]
    ) -> tuple[list[InclusionErrors], list[Tensor]]:
        """For each n: the errors, and the keys (m,) that each query keeps on average."""
        chances = [part for part in rule.parts if isinstance(part, Chance)]
        large = self.context.scores.numel() > FEW_PAIRS
        if isinstance(rule.free, Ranked) and not chances:
            return self._ranked(rule, rule.free, counts)
        if large and len(chances) == 1 and isinstance(rule.free, Random):
            return self._one_probability(rule, rule.free, counts)
        alike = large and all(isinstance(part, Random) for part in chances)
        found = [(self._of(kept, alike), kept.size) for kept in rule.ladder(self.asked, counts)]
        return [errors for errors, _ in found], [size for _, size in found]

    def _ranked(
        self, rule: Rule, free: Ranked, counts: Sequence[int | None]
    ) -> tuple[list[InclusionErrors], list[Tensor]]:
        held = rule.start(self.asked, counts)
        ladder = torch.tensor(counts, device=held.device)
        seen, sure = self.asked.visible.sum(1), held.sum(1)
        sizes = [torch.maximum(sure, seen.clamp(max=n)).double() for n in ladder.tolist()]
        order = self.asked.inside[ranking(free.order(self.asked))]
        others = torch.ones(self.context.keys, dtype=torch.bool, device=held.device)
        others[self.asked.inside] = False  # they are held: where they rank is no matter
        rest = others.nonzero()[:, 0].expand(len(order), -1)
        order = torch.cat([order, rest], dim=1)
        return ranked_errors(self.context, self._and_others(held), order, ladder, sure), sizes

    def _one_probability(
        self, rule: Rule, free: Random, counts: Sequence[int | None]
    ) -> tuple[list[InclusionErrors], list[Tensor]]:
        held = rule.start(self.asked, counts)
        sure, rest = held.sum(1).double(), (self.asked.visible & ~held).sum(1).double()
        found, sizes = [], []
        for n in counts:
            assert n is not None
            share = share_of(n - sure, rest)
            found.append(self._shared(held, share, free.reweight))
            sizes.append(sure + share * rest)
        return found, sizes

    def share(self, share: float) -> InclusionErrors:
        """Every key is kept with one probability."""
        return self._shared(torch.zeros_like(self.asked.visible), share, False)

    def _and_others(self, kept: Tensor) -> Tensor:
        """What is kept, or counts, with all that rules do not see, such as a sink logit: that is
        always kept, and counts once.
        """
        if self.context is self.asked:
            return kept
        found = self.context.visible.to(kept.dtype, copy=True)
        found[:, self.asked.inside] = kept
        return found

    def _shared(self, sure: Tensor, share: float, reweight: bool) -> InclusionErrors:
        """Every key that is not sure is kept with one probability."""
        sure = self._and_others(sure)
        rest = self._rest(sure[self.blunt]) if len(self.blunt) and 0 < share < 1 else None
        near = None if rest is None else rest.errors(share, reweight=reweight)
        if near is not None and len(self.blunt) == len(sure):
            return near
        known = torch.zeros(len(sure), dtype=torch.bool, device=sure.device)
        if near is not None:
            known[self.blunt] = True
        probability = torch.where(sure, 1.0, self.context.visible.double() * share)
        weight = torch.where(sure, 1.0, 1 / share) if reweight and share > 0 else None
        return self._completed(near, known, Inclusion(probability, weight))

    def _of(self, kept: Inclusion, alike: bool) -> InclusionErrors:
        """``alike``: worth a look whether the chances are all the same."""
        share = kept.share if alike else None
        if share is not None:
            return self._shared(kept.sure, share, kept.weight is not None)
        weight = None if kept.weight is None else self._and_others(kept.weight)
        return self._by_key(Inclusion(self._and_others(kept.probability), weight), slice(None))

    def _completed(
        self, found: InclusionErrors | None, known: Tensor, kept: Inclusion
    ) -> InclusionErrors:
        """Errors of all queries: those found, of the queries that are known, and of the others key
        by key.
        """
        if found is None:
            return self._by_key(kept, slice(None))
        others = ~known
        order = torch.cat([known.nonzero()[:, 0], others.nonzero()[:, 0]]).argsort()
        return joined([found, self._by_key(kept, others.nonzero()[:, 0])], order)

    def _by_key(self, kept: Inclusion, rows: Tensor | slice) -> InclusionErrors:
        """Of some queries; compiled where inputs are float32 and many."""
        context, p = self.context, kept.probability[rows]
        w = None if kept.weight is None else kept.weight[rows]
        single = context.dtype != torch.float64
        by_chance = bool(((p > 0) & (p < 1)).any())
        if (
            not single
            or not by_chance
            or self.context.scores.numel() <= FEW_PAIRS
            or p.device.type != "cpu"
        ):
            return inclusion_error(
                context.scores[rows], context.v, p, w, tol=SINGLE if single else TOL
            )
        seen = context.attention[rows], context.near, context.drift[rows], context.distance[rows]
        answer = doubling_errors(*seen, p, w)
        if bool(answer.known.all()):
            return answer.errors
        left = ~answer.known
        rest = inclusion_error(
            context.scores[rows][left],
            context.v,
            p[left],
            None if w is None else w[left],
            tol=SINGLE,
        )
        order = torch.cat([answer.known.nonzero()[:, 0], left.nonzero()[:, 0]]).argsort()
        return joined([answer.errors.take(answer.known), rest], order)

    @cached_property
    def grid(self) -> deposit.Grid:
        return deposit.choose_grid(self.context.dtype, "bernoulli")

    @cached_property
    def blunt(self) -> Tensor:
        """Queries for the grid. The others go key by key: their largest weight is above SHARP (that
        key's c nearly vanishes, and a grid of sums has no digits left for it), or their scores span
        more than a grid.
        """
        context = self.context
        lowest = torch.where(context.visible, context.scores, torch.inf).amin(1)
        wide = context.scores.amax(1) - lowest > 0.9 * deposit.MAX_CELLS * self.grid.spacing
        return (~wide & (context.attention.amax(1) <= SHARP)).nonzero()[:, 0]

    @cached_property
    def _near(self) -> Context:
        return (
            self.context
            if len(self.blunt) == len(self.context.q)
            else self.context.take(self.blunt)
        )

    @cached_property
    def _all(self) -> deposit.Deposit:
        """Every key that a query sees."""
        near = self._near
        state = deposit.init(len(near.q), self.grid, torch.zeros_like(near.near[0]))
        for start in range(0, near.keys, BLOCK):
            part = slice(start, start + BLOCK)
            state = deposit.update(state, near.scores[:, part], near.near[part], owned=True)
        return state

    def _rest(self, sure: Tensor) -> _Rest | None:
        if self._last is None or not torch.equal(self._last[0], sure):
            self._last = sure, _Rest.deposited(self._near, sure, self._all)
        return self._last[1]


class _Rest:
    """Deposits of the keys that are not kept surely, and the sums over those that are."""

    def __init__(
        self, state: deposit.Deposit, sure: SureKeys, drift: Tensor, rounding: float
    ) -> None:
        self.state, self.sure, self.rounding = state, sure, rounding
        grid = state.grid
        self.source = DepositSource(
            state.cells, grid.spacing, grid.points, state.center, grid.tol > 1e-8, drift
        )

    @classmethod
    def deposited(cls, context: Context, sure: Tensor, everything: deposit.Deposit) -> _Rest | None:
        """None where a query keeps all its keys surely, or one so far above the others that they
        have no weight.
        """
        others = context.visible & ~sure
        if not bool(others.any(1).all()):
            return None
        grid, state = everything.grid, everything
        if bool(sure.any()):
            scores, kept = (
                context.scores.masked_fill(~others, -torch.inf),
                context.scores.masked_fill(~sure, -torch.inf),
            )
            state = deposit.without(
                everything, kept, context.near, deposit.reach(deposit.blank(everything), scores)
            )
        anchor = (state.end.double() * grid.spacing)[:, None]
        held = SureKeys.of(
            sure, context.scores - anchor, context.near, context.drift, context.distance
        )
        if not bool(torch.isfinite(held.pair).all()):
            return None
        longest = float(context.scores[context.visible].abs().max())
        return cls(state, held, context.drift, torch.finfo(context.dtype).eps * (1 + longest))

    def errors(self, share: float, reweight: bool) -> InclusionErrors:
        grid = self.state.grid
        source = self.source.coarser(deposit.level_for(grid, share))
        found = sure_and_rest_error(
            source,
            self.state.keys,
            self.sure,
            share,
            reweight,
            step=step_for(grid.tol),
            tol=grid.tol,
        )
        return replace(found, accuracy=found.accuracy + grid.tol + self.rounding)


# ---- The error of attention through r mixtures of all keys (keep.LowRank), for a ladder of r.

REPEATS = 200
ROUNDING = 1e-12


def low_rank_curve(context: Context, rule: LowRank, n: Any = None) -> ErrorCurve:
    """``n``: ranks, where the rule has none of its own. Every query must see every key, for a
    mixture has no place.
    """
    ranks = _ranks(context, rule, n)
    if not bool(context.visible.all()):
        raise ValueError(
            "lowrank: mixtures of keys have no positions; expected queries that see every key,"
            " leave positions out"
        )
    if rule.projected:
        return _projected(context, ranks, str(rule))
    mse = _nearest(context, ranks) if rule.svd else _random(context, ranks)
    unknown = np.full(len(context.q), np.nan)
    queries = QueryErrors(
        mse=mse, sum_p2=np.full_like(mse, np.nan), limit=context.limit.cpu().numpy(), delta=unknown
    )
    how = (
        "the nearest weights of rank n"
        if rule.svd
        else "n random mixtures, mean over all Gaussian ones"
    )
    origin = f"exact error of {rule}: {how}, of {context.keys} keys"
    curve = ErrorCurve.from_queries(
        ranks,
        queries,
        None,
        kind="exact",
        origin=origin,
        accuracy=ROUNDING,
        kept=ranks.astype(np.float64),
    )
    return replace(curve, effective_tokens=None)


def _ranks(context: Context, rule: LowRank, n: Any) -> npt.NDArray[np.int64]:
    if (n is None) == (rule.rank is None):
        wanted = (
            "no n: its rank is given" if n is not None else "n, the ranks: it has none of its own"
        )
        raise ValueError(f"n: {rule} expects {wanted}")
    ranks = as_counts(rule.rank if n is None else n, "n")
    most = min(context.scores.shape) if rule.svd else context.keys
    if ranks.max() > most:
        what = (
            "the smaller of the numbers of queries and keys" if rule.svd else "the number of keys"
        )
        raise refused(f"lowrank: expected ranks of at most {most}, {what}, got {ranks.max()}")
    return ranks


def _random(context: Context, ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    spread = context.attention.square().sum(
        1
    ) * context.v.double().square().sum() + context.limit.square().sum(1)
    return spread.cpu().numpy()[:, None] / ranks


def _nearest(context: Context, ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    left, size, right = torch.linalg.svd(context.attention, full_matrices=False)
    mixed = right @ context.v.double()
    lost = [((left[:, r:] * size[r:]) @ mixed[r:]).square().sum(1) for r in ranks.tolist()]
    return torch.stack(lost, dim=1).cpu().numpy()


def _projected(context: Context, ranks: npt.NDArray[np.int64], name: str) -> ErrorCurve:
    q, both = context.q.double() * context.scale, torch.cat([context.k, context.v], dim=1).double()
    width = context.k.shape[1]
    samples = np.empty((REPEATS, len(ranks)))
    for j, rank in enumerate(ranks.tolist()):
        generator = generator_for("low rank", 0, rank)
        for i in range(REPEATS):
            matrix = torch.randn(rank, context.keys, generator=generator, dtype=torch.float64).to(
                both.device
            )
            mixed: Tensor = matrix @ both / rank**0.5
            error = torch.softmax(q @ mixed[:, :width].T, 1) @ mixed[:, width:] - context.limit
            samples[i, j] = float(error.square().sum(1).mean())
    curve = ErrorCurve.from_repeats(
        ranks,
        samples,
        scale=float(context.limit.square().sum(1).mean().sqrt()),
        origin=(
            f"simulated error of {name}: {REPEATS} Gaussian projections of {context.keys} keys and"
            " values to n"
        ),
    )
    return replace(curve, kept=ranks.astype(np.float64))
