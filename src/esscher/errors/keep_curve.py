"""The exact error of attention on the keys that a rule keeps, for a ladder of sizes. Formulas:
esscher.errors.integral.

A rule that leaves nothing to chance: sums over a ranking. Else key by key, each key with its own
probability (esscher.errors.doubling).
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

from esscher.errors.curve import ErrorCurve, QueryErrors, merged, side_by_side
from esscher.errors.doubling import Behind, Keys, doubling_errors
from esscher.inputs import as_counts, generator_for
from esscher.keep import LowRank
from esscher.keep.context import Context
from esscher.keep.rule import Chance, Ranked, Rule, ranking, refused

FEW_PAIRS = 2**12  # queries x keys up to which float32 inputs are summed in float64 too
SMALL = 1e-8  # of the largest |c|^2: smaller mean squared errors are not left to float32
LOST = 1e-10  # of the trace of a metric: smaller directions are rounding


class KeepErrors:
    """The errors of rules on one context.

    Of a restricted context a rule sees and counts the keys of the cache (``asked``); the others are
    all kept, and errors are those on all keys (``context``).
    """

    def __init__(self, context: Context) -> None:
        self.asked = context  # what rules see
        self.context = context.whole  # what sums are over: a sink logit is a sure key of value 0
        self._made: dict[tuple[bool, bool], Keys] = {}  # by precision, and whether in nats

    def curve(
        self, rule: Rule, n: Any = None, *, details: bool = False, nats: bool = False
    ) -> ErrorCurve:
        """Root mean square over the queries; ``n``: keys kept in all, for the part without a
        number. A rule whose numbers are all given has one point, at the keys it keeps on average.
        ``nats``: also 1/2 E e'F e of each query; the context has metrics.
        """
        counts = [None] if n is None else as_counts(n, "n").tolist()
        by_chance = any(isinstance(part, Chance) for part in rule.parts)
        ranked = isinstance(rule.free, Ranked) and not by_chance
        found, sizes = (self._ranked if ranked else self._by_chance)(rule, counts, nats)
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
        return self._by_key(self._and_others(self.asked.visible.double() * share), None, False)

    def _by_chance(
        self, rule: Rule, counts: Sequence[int | None], nats: bool
    ) -> tuple[QueryErrors, Tensor]:
        """The errors, and the keys (m, S) that each query keeps on average."""
        found, sizes = [], []
        for kept in rule.ladder(self.asked, counts):
            p = self._and_others(kept.probability)
            weight = None if kept.weight is None else self._and_others(kept.weight)
            found.append(self._by_key(p, weight, nats))
            sizes.append(kept.size)
        return side_by_side(found), torch.stack(sizes, dim=1)

    def _ranked(
        self, rule: Rule, counts: Sequence[int | None], nats: bool
    ) -> tuple[QueryErrors, Tensor]:
        held, free = rule.start(self.asked, counts), rule.free
        assert isinstance(free, Ranked)
        ladder = torch.tensor(counts, device=held.device)
        seen, sure = self.asked.visible.sum(1), held.sum(1)
        sizes = torch.maximum(sure[:, None], torch.minimum(seen[:, None], ladder)).double()
        order = self.asked.inside[ranking(free.order(self.asked))]
        found = ranked_errors(self.context, self._and_others(held), order, ladder, sure)
        if nats:
            assert found.bias is not None
            assert self.asked.metric is not None
            metric = self.asked.metric[self.asked.heads].double().cpu().numpy()
            found = replace(found, nats=((found.bias @ metric) * found.bias).sum(2) / 2)
        return found, sizes

    def _by_key(self, p: Tensor, w: Tensor | None, nats: bool) -> QueryErrors:
        """To the accuracy of the inputs, and faster, where these are float32 and many; errors so
        small that float32 does not have their parts in float64.
        """
        single = self.context.dtype != torch.float64 and p.numel() > FEW_PAIRS
        single = single and bool(((p > 0) & (p < 1)).any())
        keys = self._keys(single, nats)
        found = doubling_errors(keys, p, w)
        few = keys.relative(found) < SMALL if single else np.zeros(len(p), dtype=bool)
        if not few.any():
            return found
        rows = torch.from_numpy(np.flatnonzero(few))
        own = None if w is None else w[rows.to(w.device)]
        exact = doubling_errors(self._keys(False, nats).take(rows), p[rows.to(p.device)], own)
        return merged(few, exact, found.take(np.flatnonzero(~few)))

    def _keys(self, single: bool, nats: bool) -> Keys:
        if (single, nats) not in self._made:
            context, behind = self.context, self._behind if nats else None
            seen = context.scores, context.near, context.drift, context.distance
            self._made[single, nats] = Keys.of(*seen, single=single, behind=behind)
        return self._made[single, nats]

    @cached_property
    def _behind(self) -> Behind:
        heads, metric = self.asked.heads, self.asked.metric
        assert heads is not None
        assert metric is not None
        distance, roots = torch.empty_like(self.context.scores), dict[int, Tensor]()
        for head in torch.unique(heads).tolist():
            rows, roots[head] = heads == head, square_root(metric[head])
            own = self.context.take(rows.nonzero()[:, 0])
            distance[rows] = replace(own, v=own.v @ roots[head].to(own.v.dtype)).distance
        return Behind(distance, heads, roots)

    def _and_others(self, kept: Tensor) -> Tensor:
        """What is kept, or counts, with all that rules do not see, such as a sink logit: that is
        always kept, and counts once.
        """
        if self.context is self.asked:
            return kept
        found = self.context.visible.to(kept.dtype, copy=True)
        found[:, self.asked.inside] = kept
        return found


def square_root(metric: Tensor) -> Tensor:
    """L (d, r) with L L' = metric, symmetric and not negative, the largest directions first;
    directions below ``LOST`` of its trace are left out.
    """
    value, vector = torch.linalg.eigh(metric.double())
    value, vector = value.flip(0).clamp_min(0.0), vector.flip(1)
    rank = max(1, int((value > LOST * value.sum()).sum()))
    root: Tensor = vector[:, :rank] * value[:rank].sqrt()
    return root


# ---- Attention on the first n keys of a ranking, for every n of a ladder: no chance, no integral.


def ranked_errors(
    context: Context, held: Tensor, order: Tensor, counts: Tensor, sure: Tensor
) -> QueryErrors:
    """The errors at each of ``counts`` (S,): keys kept in all, the ``held`` (m, N) and then the
    first of the ranking. ``sure`` (m,): how many of the held count among them.

    ``order`` (1, N) or (m, N): indices of the keys, the first to be kept first; keys that are held
    anyway may be left out. Of the two forms of the error, a sum over kept keys and one over dropped
    keys, the one with less weight keeps its digits; weights are relative to what is kept.
    """
    free = context.visible & ~held
    order = order.expand(len(held), -1)
    place = torch.zeros_like(free, dtype=torch.int64)  # among the free keys, from 1
    place.scatter_(1, order, free.gather(1, order).cumsum(1))
    biases, pairs = [], []
    for count in counts.tolist():
        kept = held | (free & (place <= count - sure[:, None]))
        some = kept.any(1, keepdim=True)
        log_mass = context.scores.masked_fill(~kept, -torch.inf).logsumexp(1, keepdim=True)
        weight = (context.scores - torch.where(some, log_mass, 0.0)).exp()
        inside, outside = torch.where(kept, weight, 0.0), torch.where(kept, 0.0, weight)
        lighter = some & (outside.sum(1, keepdim=True) < 1)
        side = torch.where(lighter, -outside, inside)
        biases.append(side @ context.near - side.sum(1, keepdim=True) * context.drift)
        pairs.append(inside.square().sum(1))
    bias, sum_p2 = (torch.stack(x, dim=1).cpu().numpy() for x in (biases, pairs))
    return QueryErrors(
        mse=(bias**2).sum(2),
        sum_p2=sum_p2,
        limit=context.limit.cpu().numpy(),
        delta=np.full(len(bias), np.nan),
        bias=bias,
        accuracy=32 * torch.finfo(context.dtype).eps,
    )


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
        curve = ErrorCurve.from_repeats(ranks, samples.mean(1), scale=scale, origin=origin)
        return replace(curve, kept=kept, queries=_mixed(context, samples.mean(0)))
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
    origin = f"exact error of {rule}: {how}, of {context.keys} keys"
    queries = _mixed(context, mse)
    curve = ErrorCurve.from_queries(ranks, queries, kind="exact", origin=origin, kept=kept)
    return replace(curve, effective_tokens=None)


def _mixed(context: Context, mse: npt.NDArray[np.float64]) -> QueryErrors:
    unknown = np.full_like(mse, np.nan)
    limit = context.limit.cpu().numpy()
    return QueryErrors(mse, unknown, limit=limit, delta=unknown[:, 0], accuracy=ROUNDING)


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
    """Squared errors of attention on randomly projected keys and values, (REPEATS, m, len n)."""
    q, both = context.q.double() * context.scale, torch.cat([context.k, context.v], dim=1).double()
    width = context.k.shape[1]
    samples = np.empty((REPEATS, len(q), len(ranks)))
    for j, rank in enumerate(ranks.tolist()):
        generator = generator_for("low rank", 0, rank)
        for i in range(REPEATS):
            matrix = torch.randn(rank, context.keys, generator=generator, dtype=torch.float64)
            mixed: Tensor = matrix.to(both.device) @ both / rank**0.5
            error = torch.softmax(q @ mixed[:, :width].T, 1) @ mixed[:, width:] - context.limit
            samples[i, :, j] = error.square().sum(1).cpu().numpy()
    return samples
