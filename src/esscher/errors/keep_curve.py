"""The exact error of attention on the keys that a rule keeps, for a ladder of sizes. Formulas:
esscher.errors.integral.

Four ways, by what a rule leaves to chance. Nothing: sums over a ranking. One probability for all
keys that it does not keep surely: one deposit of these on score grids serves every probability.
Probabilities of their own: key by key, of float32 inputs by compiled sums
(esscher.errors.doubling).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.errors import grid as deposit
from esscher.errors.curve import ErrorCurve, QueryErrors, merged, side_by_side
from esscher.errors.doubling import doubling_errors
from esscher.errors.grid import Deposit, DepositSource
from esscher.errors.integral import SureKeys, kept_errors, step_for
from esscher.errors.nodes import TOL, inclusion_error
from esscher.inputs import as_counts, generator_for
from esscher.keep import LowRank
from esscher.keep.chance import Random, share_of
from esscher.keep.context import Context
from esscher.keep.rule import Chance, Ranked, Rule, first_of, ranking, refused

FEW_PAIRS = 2**12  # queries x keys up to which the sum key by key is as fast as the others
BLOCK = 8192  # keys deposited at once
SHARP = 0.999
FAR_ABOVE = 300.0  # nats by which a sure key may exceed the others of a grid
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
        self.large = self.context.scores.numel() > FEW_PAIRS
        self._last: tuple[Tensor, _Rest | None] | None = None

    def curve(self, rule: Rule, n: Any = None, *, details: bool = False) -> ErrorCurve:
        """As ``keep_curve``."""
        counts = [None] if n is None else as_counts(n, "n").tolist()
        ranked = isinstance(rule.free, Ranked) and not rule_chances(rule)
        found, sizes = (self._ranked if ranked else self._by_chance)(rule, counts)
        kept = sizes.mean(0).cpu().numpy()
        ladder = [max(1, round(float(kept[0])))] if n is None else counts
        return ErrorCurve.from_queries(
            np.asarray(ladder, dtype=np.int64),
            replace(
                found,
                limit=self.asked.limit.cpu().numpy(),
                bias=found.bias if details else None,
            ),
            kind="exact",
            origin=f"exact error on the keys that {rule} keeps of {self.asked.keys}",
            kept=kept,
        )

    def share(self, share: float) -> QueryErrors:
        """Every key is kept with one probability."""
        return self._shared(torch.zeros_like(self.asked.visible), share, False)

    def _by_chance(self, rule: Rule, counts: Sequence[int | None]) -> tuple[QueryErrors, Tensor]:
        """The errors, and the keys (m, S) that each query keeps on average."""
        chances, found, sizes = rule_chances(rule), [], []
        if self.large and len(chances) == 1 and isinstance(rule.free, Random):
            held = rule.start(self.asked, counts)
            sure, rest = held.sum(1).double(), (self.asked.visible & ~held).sum(1).double()
            for n in counts:
                assert n is not None
                share = share_of(n - sure, rest)
                found.append(self._shared(held, share, rule.free.reweight))
                sizes.append(sure + share * rest)
            return side_by_side(found), torch.stack(sizes, dim=1)
        alike = self.large and all(isinstance(part, Random) for part in chances)
        for kept in rule.ladder(self.asked, counts):
            one = kept.share if alike else None
            if one is not None:
                found.append(self._shared(kept.sure, one, kept.weight is not None))
            else:
                weight = None if kept.weight is None else self._and_others(kept.weight)
                probability = self._and_others(kept.probability)
                found.append(_by_key(self.context, probability, weight, self.large))
            sizes.append(kept.size)
        return side_by_side(found), torch.stack(sizes, dim=1)

    def _ranked(self, rule: Rule, counts: Sequence[int | None]) -> tuple[QueryErrors, Tensor]:
        held, free = rule.start(self.asked, counts), rule.free
        assert isinstance(free, Ranked)
        ladder = torch.tensor(counts, device=held.device)
        seen, sure = self.asked.visible.sum(1), held.sum(1)
        sizes = torch.maximum(sure[:, None], torch.minimum(seen[:, None], ladder)).double()
        order = self.asked.inside[ranking(free.order(self.asked))]
        others = torch.ones(self.context.keys, dtype=torch.bool, device=held.device)
        others[self.asked.inside] = False  # they are held: where they rank is no matter
        order = torch.cat([order, others.nonzero()[:, 0].expand(len(order), -1)], dim=1)
        return ranked_errors(self.context, self._and_others(held), order, ladder, sure), sizes

    def _and_others(self, kept: Tensor) -> Tensor:
        """What is kept, or counts, with all that rules do not see, such as a sink logit: that is
        always kept, and counts once.
        """
        if self.context is self.asked:
            return kept
        found = self.context.visible.to(kept.dtype, copy=True)
        found[:, self.asked.inside] = kept
        return found

    def _shared(self, sure: Tensor, share: float, reweight: bool) -> QueryErrors:
        """Every key that is not sure is kept with one probability."""
        sure, context = self._and_others(sure), self.context
        rest = self._rest(sure[self.blunt]) if bool(self.blunt.any()) and 0 < share < 1 else None
        near = None if rest is None else _rest_errors(rest, self.grid, share, reweight)
        if near is not None and bool(self.blunt.all()):
            return near
        probability = torch.where(sure, 1.0, context.visible.double() * share)
        weight = torch.where(sure, 1.0, 1 / share) if reweight and share > 0 else None
        if near is None:
            return _by_key(context, probability, weight, self.large)
        rows = (~self.blunt).nonzero()[:, 0]
        weight = None if weight is None else weight[rows]
        far = _by_key(context.take(rows), probability[rows], weight, self.large)
        return merged(self.blunt.cpu().numpy(), near, far)

    @cached_property
    def grid(self) -> deposit.Grid:
        return deposit.choose_grid(self.context.dtype, "bernoulli")

    @cached_property
    def blunt(self) -> Tensor:
        """Which queries go to the grid, (m,). The others go key by key: their largest weight is
        above SHARP (that key's c nearly vanishes, and a grid of sums has no digits left for it), or
        their scores span more than a grid.
        """
        context = self.context
        lowest = torch.where(context.visible, context.scores, torch.inf).amin(1)
        wide = context.scores.amax(1) - lowest > 0.9 * deposit.MAX_CELLS * self.grid.spacing
        return ~wide & (context.attention.amax(1) <= SHARP)

    @cached_property
    def _near(self) -> Context:
        rows = self.blunt.nonzero()[:, 0]
        return self.context if bool(self.blunt.all()) else self.context.take(rows)

    @cached_property
    def _all(self) -> Deposit:
        """Every key that a query sees."""
        near = self._near
        state = deposit.init(len(near.q), self.grid, torch.zeros_like(near.near[0]))
        for start in range(0, near.keys, BLOCK):
            part = slice(start, start + BLOCK)
            state = deposit.update(state, near.scores[:, part], near.near[part], owned=True)
        return state

    def _rest(self, sure: Tensor) -> _Rest | None:
        if self._last is None or not torch.equal(self._last[0], sure):
            self._last = sure, _deposited(self._near, sure, self._all)
        return self._last[1]


def rule_chances(rule: Rule) -> list[Chance]:
    return [part for part in rule.parts if isinstance(part, Chance)]


# The deposits of the keys that are not sure, their numbers (m,), the sums over the sure keys, and
# the rounding of scores.
_Rest = tuple[DepositSource, Tensor, SureKeys, float]


def _deposited(context: Context, sure: Tensor, state: Deposit) -> _Rest | None:
    """None where a query keeps all its keys surely, or one so far above the others that they have
    no weight.
    """
    others, scores = context.visible & ~sure, context.scores
    if not bool(others.any(1).all()):
        return None
    if bool(sure.any()):
        rest, kept = (scores.masked_fill(~part, -torch.inf) for part in (others, sure))
        extent = deposit.reach(deposit.blank(state), rest)
        state = deposit.without(state, kept, context.near, extent)
    grid = state.grid
    below = scores - (state.end.double() * grid.spacing)[:, None]
    held = SureKeys.of(sure, below, context.near, context.drift, context.distance)
    if float(held.log_unit.max()) > FAR_ABOVE:
        return None
    source = DepositSource(
        state.cells, grid.spacing, grid.points, state.center, grid.tol > 1e-8, context.drift
    )
    longest = float(scores[context.visible].abs().max())
    return source, state.keys, held, torch.finfo(context.dtype).eps * (1 + longest)


def _rest_errors(rest: _Rest, grid: deposit.Grid, share: float, reweight: bool) -> QueryErrors:
    """Reweighted keys count 1/f; over f, sure keys count f and the others 1. As sum e c = 0 over
    all keys, B = M (1 - f), or 0 where keys are reweighted.
    """
    source, keys, held, rounding = rest
    first = held.log_unit.exp()[:, None] * held.vector * (0.0 if reweight else 1.0 - share)
    if reweight:
        held = replace(held, log_unit=held.log_unit + math.log(share))
    found = kept_errors(
        source.coarser(deposit.level_for(grid, share)),
        keys,
        share,
        1 - share,
        held,
        first,
        step=step_for(grid.tol),
        tol=grid.tol,
    )
    return replace(found, accuracy=found.accuracy + grid.tol + rounding)


def _by_key(context: Context, p: Tensor, w: Tensor | None, large: bool) -> QueryErrors:
    """Compiled where inputs are float32 and many."""
    single = context.dtype != torch.float64
    by_chance = bool(((p > 0) & (p < 1)).any())
    if not (single and by_chance and large and p.device.type == "cpu"):
        return inclusion_error(context.scores, context.v, p, w, tol=SINGLE if single else TOL)
    seen = context.attention, context.near, context.drift, context.distance
    found, known = doubling_errors(*seen, p, w)
    if bool(known.all()):
        return found
    left = torch.from_numpy(~known)
    own = None if w is None else w[left]
    rest = inclusion_error(context.scores[left], context.v, p[left], own, tol=SINGLE)
    return merged(known, found.take(np.flatnonzero(known)), rest)


# ---- Attention on the first n keys of a ranking, for every n of a ladder: no chance, no integral.

# torch says once that the format is young; of it only products with dense matrices are used
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0, 1], [0], [1.0])


def ranked_errors(
    context: Context, held: Tensor, order: Tensor, counts: Tensor, sure: Tensor
) -> QueryErrors:
    """The errors at each of ``counts`` (S,): keys kept in all, the ``held`` (m, N) and then the
    first of the ranking. ``sure`` (m,): how many of the held count among them.

    ``order`` (1, N) or (m, N): indices of the keys, the first to be kept first.
    """
    places = counts.argsort()
    first, steps, drops = _steps(context, held, order, counts[places], sure)
    kept = steps[:, :-1].cumsum(1) + first[:, None]  # (m, S, d + 2)
    dropped = steps.flip(1).cumsum(1).flip(1)[:, 1:]
    mass, light = kept[:, :, -2], dropped[:, :, -2]
    drift = context.drift[:, None]
    vector = torch.where(
        (light < mass)[:, :, None],
        light[:, :, None] * drift - dropped[:, :, :-2],
        kept[:, :, :-2] - mass[:, :, None] * drift,
    )
    some = torch.where(mass > 0, mass, 1.0)
    bias, pair = vector / some[:, :, None], kept[:, :, -1] / some.square()
    least = torch.finfo(context.dtype).tiny
    # pi^2 is summed over what is kept, pi alone over what is dropped
    faint = ((mass < 1e4 * least**0.5) | ((light < 1e8 * least) & drops)).any(1)
    rows = faint.nonzero()[:, 0]
    if len(rows):
        own = order.expand(len(held), -1)[rows]
        bias[rows], pair[rows] = _one_by_one(context.take(rows), held[rows], own, counts[places])
    back = places.argsort()
    mean, sum_p2 = bias[:, back].cpu().numpy(), pair[:, back].cpu().numpy()
    return QueryErrors(
        mse=(mean**2).sum(2),
        sum_p2=sum_p2,
        limit=context.limit.cpu().numpy(),
        delta=np.full(len(sum_p2), np.nan),
        bias=mean,
        accuracy=32 * torch.finfo(context.dtype).eps,
    )


def _steps(
    context: Context, held: Tensor, order: Tensor, counts: Tensor, sure: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of pi (value, 1, pi) over the keys held, (m, d + 2), and over those between two n, (m, S
    + 1, d + 2); and whether an n drops a key, (m, S).
    """
    weight, near = context.attention.to(context.dtype), context.near.to(context.dtype)
    rows = torch.cat([near, torch.ones_like(near[:, :1])], dim=1)
    m, keys = weight.shape
    free = context.visible & ~held
    first = torch.zeros(m, rows.shape[1] + 1, dtype=torch.float64, device=weight.device)
    if bool(held.any()):
        kept = torch.where(held, weight, 0.0)
        first = torch.cat([kept @ rows, kept.square().sum(1, keepdim=True)], dim=1).double()
    columns = order.expand(m, keys)
    weights = weight.gather(1, columns)
    total = free.sum(1)
    if not bool(free.all()):
        inside = free.gather(1, columns)
        columns, weights = columns[inside], weights[inside]
    ends = torch.minimum((counts - sure[:, None]).clamp_min(0), total[:, None])  # (m, S)
    drops = ends < total[:, None]
    ends = torch.cat([ends, total[:, None]], dim=1)
    starts = torch.cumsum(total, 0) - total
    edges = torch.cat([torch.zeros_like(ends[:1, 0]), (starts[:, None] + ends).flatten()])
    weights, shape = weights.flatten(), (len(edges) - 1, keys)
    sparse = torch.sparse_csr_tensor(  # 32-bit indices, which the fastest products ask for
        edges.int(), columns.flatten().int(), weights, shape, check_invariants=False
    )
    pairs = torch.segment_reduce(weights.square(), "sum", offsets=edges, initial=0.0)
    sums = torch.cat([sparse @ rows, pairs[:, None]], dim=1).double()
    return first, sums.reshape(m, len(counts) + 1, -1), drops


def _one_by_one(
    context: Context, held: Tensor, order: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Bias (m, S, d) and sum p^2 (m, S) from the logarithm of what each set weighs."""
    steps = -torch.arange(order.shape[1]).to(order).expand_as(order)
    place = torch.empty_like(order).scatter_(1, order, steps)
    free, biases, pairs = context.visible & ~held, [], []
    for count in counts.tolist():
        kept = held | first_of(place, free, count - held.sum(1))
        inside, outside = (
            context.scores.masked_fill(~part, -torch.inf)
            for part in (kept, context.visible & ~kept)
        )
        log_mass = inside.logsumexp(1, keepdim=True)
        lighter = outside.logsumexp(1, keepdim=True) < log_mass
        weight, lost = (inside - log_mass).exp(), (outside - log_mass).exp()
        of_kept, of_dropped = (
            x @ context.near - x.sum(1, keepdim=True) * context.drift for x in (weight, lost)
        )
        biases.append(torch.where(lighter, -of_dropped, of_kept))
        pairs.append(weight.square().sum(1))
    return torch.stack(biases, dim=1), torch.stack(pairs, dim=1)


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
    kept = ranks.astype(np.float64)
    if rule.projected:
        scale = float(context.limit.square().sum(1).mean().sqrt())
        origin = (
            f"simulated error of {rule}: {REPEATS} Gaussian projections of {context.keys} keys and"
            " values to n"
        )
        samples = _projected(context, ranks)
        return replace(
            ErrorCurve.from_repeats(ranks, samples, scale=scale, origin=origin), kept=kept
        )
    if rule.svd:
        how = "the nearest weights of rank n"
        left, size, right = torch.linalg.svd(context.attention, full_matrices=False)
        mixed = right @ context.v.double()
        lost = [((left[:, r:] * size[r:]) @ mixed[r:]).square().sum(1) for r in ranks.tolist()]
        mse = torch.stack(lost, dim=1).cpu().numpy()
    else:
        how = "n random mixtures, mean over all Gaussian ones"
        pairs, values = context.attention.square().sum(1), context.v.double().square().sum()
        mse = (pairs * values + context.limit.square().sum(1)).cpu().numpy()[:, None] / ranks
    queries = QueryErrors(
        mse=mse,
        sum_p2=np.full_like(mse, np.nan),
        limit=context.limit.cpu().numpy(),
        delta=np.full(len(mse), np.nan),
        accuracy=ROUNDING,
    )
    origin = f"exact error of {rule}: {how}, of {context.keys} keys"
    curve = ErrorCurve.from_queries(ranks, queries, kind="exact", origin=origin, kept=kept)
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


def _projected(context: Context, ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Mean squared errors of attention on randomly projected keys and values, (REPEATS, len n)."""
    q, both = context.q.double() * context.scale, torch.cat([context.k, context.v], dim=1).double()
    width = context.k.shape[1]
    samples = np.empty((REPEATS, len(ranks)))
    for j, rank in enumerate(ranks.tolist()):
        generator = generator_for("low rank", 0, rank)
        for i in range(REPEATS):
            matrix = torch.randn(rank, context.keys, generator=generator, dtype=torch.float64)
            mixed: Tensor = matrix.to(both.device) @ both / rank**0.5
            error = torch.softmax(q @ mixed[:, :width].T, 1) @ mixed[:, width:] - context.limit
            samples[i, j] = float(error.square().sum(1).mean())
    return samples
