"""The exact error of attention on the keys that a rule keeps, for a ladder of sizes: of a pool of
keys, and of tokens of a law. Formulas: esscher.errors.integral.

On a pool, a rule that leaves nothing to chance: sums over a ranking. Else key by key, each key with
its own probability (esscher.errors.doubling). On a law the error is against the limit of the law:

A context of N tokens: a mean over contexts drawn from the law, each with its exact error; ``kind``
is "montecarlo". No key kept counts as no error. The context's own error is part of it: at
n = N every rule is attention on N tokens.

A context without end: N grows at fixed n, given that n keys are kept. They are n independent draws
from the law of density p / E p, and N is gone from the formula. For ``random`` this is the error at
n tokens. For ``neyman`` p is proportional to e |c|, so that eps is to 1/|c| and the score counts no
more: n draws from the tilted law by their size |c|, and

    Gamma_keep - Gamma = sum_j u_j / sum_j |c_j|^-1,     u = c / |c|.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.attention.head import Head
from esscher.attention.limit import limit
from esscher.errors.curve import ErrorCurve, QueryErrors, concatenate, side_by_side
from esscher.errors.doubling import Behind, Keys, ladder_errors, with_exact
from esscher.errors.integral import error_from_nodes, line_nodes
from esscher.errors.scatter import in_threads
from esscher.inputs import as_counts, generator_for
from esscher.keep import LowRank
from esscher.keep.chance import Neyman, Random
from esscher.keep.context import Context
from esscher.keep.rule import Chance, Inclusion, Ranked, Rule, Scales, ranking, refused
from esscher.measures.base import Measure
from esscher.measures.line import graded
from esscher.measures.matrices import is_multiple_of_identity, product
from esscher.measures.rotational import Rotational

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

FEW_PAIRS = 2**12  # queries x keys up to which float32 inputs are summed in float64 too
SMALL = 1e-20  # of the largest |c|^2: smaller mean squared errors are not left to float32
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

    def _by_chance(
        self, rule: Rule, counts: Sequence[int | None], nats: bool
    ) -> tuple[QueryErrors, Tensor]:
        """The errors, and the keys (m, S) that each query keeps on average. Errors are found to the
        accuracy of the inputs, and faster, where these are float32 and many; errors so small that
        float32 does not have their parts in float64.
        """
        some = any(isinstance(part, Chance) for part in rule.parts)
        large = self.context.scores.numel() > FEW_PAIRS
        single = some and large and self.context.dtype != torch.float64
        scales = rule.scales(self.asked, counts) if single else None
        ladder = [scales] if scales is not None else map(_alone, rule.ladder(self.asked, counts))
        keys, found, sizes = self._keys(single, nats), [], []
        for chances in ladder:
            assert chances.size is not None
            sizes.append(chances.size)
            chances = chances._replace(
                gain=self._and_others(chances.gain, math.inf),
                weight=None if chances.weight is None else self._and_others(chances.weight, 1.0),
            )
            errors = ladder_errors(keys, chances)
            small = keys.relative(errors) < (SMALL if single else 0)
            found.append(
                with_exact(errors, small, lambda rows: self._keys(False, nats).take(rows), chances)
            )
        return side_by_side(found), torch.cat(sizes, dim=1)

    def _ranked(
        self, rule: Rule, counts: Sequence[int | None], nats: bool
    ) -> tuple[QueryErrors, Tensor]:
        held, free = rule.start(self.asked, counts), rule.free
        assert isinstance(free, Ranked)
        ladder = torch.tensor(counts, device=held.device)
        seen, sure = self.asked.visible.sum(1), held.sum(1)
        sizes = torch.maximum(sure[:, None], torch.minimum(seen[:, None], ladder)).double()
        order = self.asked.inside[ranking(free.order(self.asked))]
        found = ranked_errors(self.context, self._and_others(held, 1.0), order, ladder, sure)
        if nats:
            assert found.bias is not None
            assert self.asked.metric is not None
            assert self.asked.heads is not None
            metric = self.asked.metric.double().cpu()[self.asked.heads.cpu()].numpy()
            found = replace(found, nats=((found.bias @ metric) * found.bias).sum(2) / 2)
        return found, sizes

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

    def _and_others(self, kept: Tensor, surely: float) -> Tensor:
        """Numbers of keys with those of all that rules do not see, such as a sink logit: that is
        always kept, and counts once.
        """
        if self.context is self.asked:
            return kept
        found = torch.where(self.context.visible, surely, 0.0).to(kept.dtype)
        found[:, self.asked.inside] = kept
        return found


def _alone(kept: Inclusion) -> Scales:
    """The chances at one size."""
    p = kept.probability
    gain, factor = p.masked_fill(kept.sure, math.inf), torch.ones_like(p[:, :1])
    return Scales(gain, factor, kept.weight, size=kept.size[:, None])


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

DEEP = 1e-140  # of all weight, whose squares are numbers still: queries that keep less are summed
# from their kept scores
SOME = 8  # queries of one task


def ranked_errors(
    context: Context, held: Tensor, order: Tensor, counts: Tensor, sure: Tensor
) -> QueryErrors:
    """The errors at each of ``counts`` (S,): keys kept in all, the ``held`` (m, N) and then the
    first of the ranking. ``sure`` (m,): how many of the held count among them.

    ``order`` (1, N) or (m, N): indices of the keys, the first to be kept first; keys that are held
    anyway may be left out. Of the two forms of the error, a sum over kept keys and one over dropped
    keys, the one with less weight keeps its digits; weights are relative to what is kept. On the
    CPU every key is added once, to the sums of the first size that keeps it.
    """
    free = context.visible & ~held
    if free.device.type == "cpu":
        bias, sum_p2 = _by_size(context, held, free, order, counts, sure)
    else:
        order = order.expand(len(held), -1)
        bias, sum_p2 = size_by_size(context, held, free, order, counts - sure[:, None])
    return QueryErrors(
        mse=(bias**2).sum(2),
        sum_p2=sum_p2,
        limit=context.limit.cpu().numpy(),
        delta=np.full(len(bias), np.nan),
        bias=bias,
        accuracy=32 * torch.finfo(context.dtype).eps,
    )


def size_by_size(
    context: Context, held: Tensor, free: Tensor, order: Tensor, counts: Tensor
) -> tuple[Floats, Floats]:
    """Bias (m, S, d) and sum p^2 (m, S) from a softmax over the kept keys of every size: the held
    and the first of the free, ``counts`` (m, S).
    """
    place = torch.zeros_like(free, dtype=torch.int64)  # among the free keys, from 1
    place.scatter_(1, order, free.gather(1, order).cumsum(1))
    biases, pairs = [], []
    for count in counts.unbind(1):
        kept = held | (free & (place <= count[:, None]))
        some = kept.any(1, keepdim=True)
        log_mass = context.scores.masked_fill(~kept, -torch.inf).logsumexp(1, keepdim=True)
        weight = (context.scores - torch.where(some, log_mass, 0.0)).exp()
        inside, outside = torch.where(kept, weight, 0.0), torch.where(kept, 0.0, weight)
        lighter = some & (outside.sum(1, keepdim=True) < 1)
        side = torch.where(lighter, -outside, inside)
        biases.append(side @ context.near - side.sum(1, keepdim=True) * context.drift)
        pairs.append(inside.square().sum(1))
    bias, sum_p2 = (torch.stack(x, dim=1).cpu().numpy() for x in (biases, pairs))
    return bias, sum_p2


def _by_size(
    context: Context, held: Tensor, free: Tensor, order: Tensor, counts: Tensor, sure: Tensor
) -> tuple[Floats, Floats]:
    """What ``size_by_size`` finds, by sums over the keys that each size adds to the next smaller
    one.
    """
    sizes, place = np.unique(counts.numpy(), return_inverse=True)
    sums = np.zeros((len(held), len(sizes) + 1, context.near.shape[1] + 2))
    left = sizes - sure.numpy()[:, None]
    weight, near, order = (
        context.attention.numpy(),
        context.near.numpy(),
        order.expand(len(held), -1),
    )

    def task(i: int) -> None:
        part = slice(i, i + SOME)
        rows = held[part].numpy(), free[part].numpy(), order[part].numpy()
        _add_up(weight[part], rows[0], rows[1], rows[2], left[part], near, sums[part])

    in_threads(task, range(0, len(held), SOME))
    kept = sums[:, :-1].cumsum(1)
    dropped = sums[:, :0:-1].cumsum(1)[:, ::-1]
    mass, lost = kept[:, :, -2:-1], dropped[:, :, -2:-1]
    side = np.where(lost < mass, -dropped, kept)
    with np.errstate(divide="ignore", invalid="ignore"):
        bias = (side[:, :, :-2] - side[:, :, -2:-1] * context.drift.numpy()[:, None]) / mass
        sum_p2 = kept[:, :, -1] / mass[:, :, 0] ** 2
    deep = np.flatnonzero(mass[:, 0, 0] < DEEP)
    if len(deep):
        at = torch.from_numpy(deep)
        few = torch.from_numpy(left[deep])
        bias[deep], sum_p2[deep] = size_by_size(
            context.take(at), held[at], free[at], order[at], few
        )
    return bias[:, place], sum_p2[:, place]


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _add_up(
    weight: Any, held: Any, free: Any, order: Any, counts: Any, near: Any, sums: Any
) -> None:
    """Add each key's w v, w and w^2 to the ``sums`` (m, S + 1, d + 2) of the first size that keeps
    it; to the last where none does.
    """
    last, width = counts.shape[1], near.shape[1]
    size = np.empty(len(near), dtype=np.int64)
    for i in range(len(weight)):
        size[:] = last
        level = taken = 0
        for r in range(order.shape[1]):
            j = order[i, r]
            if free[i, j]:
                taken += 1
                while level < last and taken > counts[i, level]:
                    level += 1
                size[j] = level
        for j in range(len(near)):
            w, own = weight[i, j], sums[i, 0 if held[i, j] else size[j]]
            for channel in range(width):
                own[channel] += w * near[j, channel]
            own[width] += w
            own[width + 1] += w * w


# ---- The error of attention through r mixtures of all keys (keep.LowRank), for a ladder of r.

ROUNDING = 1e-12


def low_rank_curve(context: Context, rule: LowRank, n: Any = None) -> ErrorCurve:
    """``n``: ranks, where the rule has none of its own. Every query must see every key, for a
    mixture has no place.
    """
    if (n is None) == (rule.rank is None):
        wanted = "n, the ranks: it has none of its own" if n is None else "no n: its rank is given"
        raise ValueError(f"n: {rule} expects {wanted}")
    ranks = as_counts(rule.rank if n is None else n, "n")
    if ranks.max() > context.keys:
        raise refused(
            f"lowrank: expected ranks of at most {context.keys}, the number of keys, got"
            f" {ranks.max()}"
        )
    if not bool(context.visible.all()):
        raise ValueError(
            "lowrank: mixtures of keys have no positions; expected queries that see every key,"
            " leave positions out"
        )
    pairs, values = context.attention.square().sum(1), context.v.double().square().sum()
    mse = (pairs * values + context.limit.square().sum(1)).cpu().numpy()[:, None] / ranks
    unknown, limit = np.full_like(mse, np.nan), context.limit.cpu().numpy()
    queries = QueryErrors(mse, unknown, limit=limit, delta=unknown[:, 0], accuracy=ROUNDING)
    origin = f"exact error of {rule}: mean over all n random mixtures of {context.keys} keys"
    kept = ranks.astype(np.float64)
    curve = ErrorCurve.from_queries(ranks, queries, kind="exact", origin=origin, kept=kept)
    return replace(curve, effective_tokens=None)


# ---- Tokens of a law.

CONTEXTS = 64  # drawn from the law


@dataclass(frozen=True)
class LawRule:
    """A rule on a law, the sizes n of its ladder, and at each n the tokens of the context; None:
    without end.
    """

    rule: Rule
    n: Counts
    context: Counts | None

    @classmethod
    def of(cls, rule: Rule, n: Any, context: Any) -> LawRule:
        """The rule with its ladder, checked."""
        part, free = rule.parts[0], rule.free is not None
        if context is None:
            alone = len(rule.parts) == 1 and not getattr(part, "shared", False)
            if not (alone and free and isinstance(part, Random | Neyman)):
                raise ValueError(
                    f"context: {rule} chooses keys of a context, expected how many tokens that has;"
                    " got none (without end there are random and neyman, without a number of their"
                    " own)"
                )
            return cls(rule, as_counts(n, "n"), None)
        if (n is None) == free:
            wanted = "n: a part has no number of its own"
            wanted = wanted if free else "no n: every number of the rule is given"
            raise ValueError(f"n: the rule {rule} expects {wanted}; got {n!r}")
        tokens = as_counts(context, "context")
        sizes = np.ones_like(tokens) if n is None else as_counts(n, "n")
        if tokens.size not in (1, sizes.size):
            raise ValueError(
                f"context: expected one number of tokens, or one for each of {sizes.size} n, got"
                f" {tokens.size}"
            )
        tokens = np.broadcast_to(tokens, sizes.shape)
        if (sizes > tokens).any():
            worst = int((sizes - tokens).argmax())
            raise ValueError(
                f"n: expected at most {tokens[worst]}, the tokens of the context, got"
                f" {sizes[worst]}"
            )
        return cls(rule, sizes, tokens)

    @property
    def plain(self) -> bool:
        """Whether it draws n tokens as they come."""
        return self.context is None and isinstance(self.rule.parts[0], Random)

    def curve(
        self, head: Head, measure: Measure, x: Tensor, details: bool, seed: int
    ) -> ErrorCurve:
        """Over the rows ``x``."""
        law = f"{type(measure).__name__} tokens: what {self.rule} keeps of a context"
        if self.context is not None:
            tokens = ", ".join(map(str, self.context))
            origin = f"{law} of {tokens} tokens, of which {CONTEXTS} are drawn (seed {seed})"
            return _over_contexts(head, measure, x, self, origin, seed)
        errors = _without_end(head, measure, x, self.n)
        return ErrorCurve.from_queries(
            self.n,
            errors if details else replace(errors, bias=None),
            kind="exact",
            origin=f"exact, {law} without end",
            kept=self.n.astype(np.float64),
        )


# ---- A context of N tokens: drawn from the law.


def _over_contexts(
    head: Head, measure: Measure, x: Tensor, law: LawRule, origin: str, seed: int
) -> ErrorCurve:
    """The mean over drawn contexts of the exact error against the law's limit g: around the limit
    g' of the context, E|Gamma - g|^2 = E|Gamma - g'|^2 + 2 <bias', g' - g> + |g' - g|^2 P(a key is
    kept).
    """
    assert law.context is not None
    generator = generator_for("contexts of a law", seed)
    target = limit(head, measure)(x).double().cpu().numpy()
    mse, sum_p2 = np.empty((2, CONTEXTS, len(x), law.n.size))
    kept = np.zeros(law.n.size)
    for i in range(CONTEXTS):
        for j, (n, N) in enumerate(zip(law.n.tolist(), law.context.tolist(), strict=True)):
            y = measure.sample(N, generator).double()
            context = Context.of(head.queries(x), head.keys(y), head.values(y), 1.0)
            size = n if law.rule.free else None
            curve = KeepErrors(context).curve(law.rule, size, details=True)
            found = curve.queries
            assert found is not None
            assert found.bias is not None
            assert curve.kept is not None
            gap = found.limit - target
            missed = 1 - law.rule.include(context, size).probability
            some = 1 - missed.prod(1).cpu().numpy()
            cross = 2 * (found.bias[:, 0] * gap).sum(1)
            mse[i, :, j] = (found.mse[:, 0] + cross + (gap**2).sum(1) * some).clip(min=0)
            sum_p2[i, :, j] = found.sum_p2[:, 0]
            kept[j] += float(curve.kept[0]) / CONTEXTS
    unknown = np.full(len(x), np.nan)
    queries = QueryErrors(mse.mean(0), sum_p2.mean(0), limit=target, delta=unknown)
    ladder = law.n if law.rule.free else np.maximum(1, np.rint(kept)).astype(np.int64)
    scale = float(np.sqrt((target**2).sum(1).mean()))
    drawn = ErrorCurve.from_repeats(ladder, mse.mean(1), scale=scale, origin=origin)
    return replace(drawn, kept=kept, queries=queries)


# ---- Neyman's keys of a context without end: draws from the tilted law by their size |c|, c = V y
# + v0 - Gamma.

REACH = 12.0  # deviations
HALVINGS = 40  # of the panels towards |c| = 0
ALIKE = 1e-10  # relative spread of eigenvalues taken for equal
# under the tilted law: |c| (N,), logarithms of weights (N,), the mean of c given the node (N, d)
Sizes = tuple[Tensor, Tensor, Tensor]


def _without_end(head: Head, measure: Measure, x: Tensor, n: Counts) -> QueryErrors:
    rows = []
    limits = limit(head, measure)(x).double()
    for theta, target in zip(head.tilt(x).double(), limits, strict=True):
        sizes = tilted_sizes(head, measure, theta, target)
        used = sizes[0] > 0
        size, weight, centre = (part[used] for part in sizes)
        extra = (size.square() - centre.square().sum(1)).clamp_min(0.0)
        if size.numel() == 0:  # every value is the limit
            size, weight, centre = size.new_ones(1), size.new_zeros(1), sizes[2][:1]
            extra = torch.zeros_like(size)
        found = error_from_nodes(
            -size.log()[None], weight + size.log(), centre, extra, n, details=True
        )
        rows.append(replace(found, limit=target.cpu().numpy()[None]))
    return concatenate(rows)


def tilted_sizes(head: Head, measure: Measure, theta: Tensor, limit: Tensor) -> Sizes:
    """At one tilt (d,), of laws and heads that leave |c| one-dimensional."""
    if measure.is_gaussian:
        return _of_gaussian(head, measure, limit)
    gram = product(head.V.double().T, head.V.double())
    if isinstance(measure, Rotational):
        known = is_multiple_of_identity(gram, ALIKE)  # then |V y| is a multiple of |y|
    else:
        known = measure.as_pool() is not None
    lines = measure.along(theta) if known else None
    if lines is None:
        raise ValueError(
            f"context: neyman without end is not known for {type(measure).__name__} tokens and this"
            " V; expected how many tokens the context has"
        )
    score, weight, value, extra = line_nodes(head, lines)
    centre = value - limit
    size = (centre.square().sum(1) + extra).sqrt()
    return size, torch.log_softmax(score + weight, 0), centre


def _of_gaussian(head: Head, measure: Measure, limit: Tensor) -> Sizes:
    """c ~ N(0, V Sigma V^T) under every tilt: given its size, its mean is 0."""
    spread = product(head.V.double(), measure.root)
    values = torch.linalg.eigvalsh(product(spread, spread.T)).cpu().numpy()
    values = values[values > ALIKE * values.max()]
    if values.size == 0:
        return limit.new_zeros(1), limit.new_zeros(1), torch.zeros_like(limit)[None]
    bell, unit = math.sqrt(float(values.sum())), math.sqrt(float(values.max()))
    rho, lengths = graded(max(0.0, bell - REACH * unit), bell + REACH * unit, unit, HALVINGS)
    if np.ptp(values) <= ALIKE * values.max():
        log_density = (values.size - 1) * rho.log() - (rho / unit) ** 2 / 2
    else:
        log_density = torch.from_numpy(log_chi_square_density(values, (rho**2).numpy()))
        log_density = log_density + rho.log()
    weights = torch.log_softmax(lengths.log() + log_density, 0)
    return rho.to(limit), weights.to(limit), limit.new_zeros(len(rho), len(limit))


def log_chi_square_density(values: Floats, t: Floats) -> Floats:
    """Logarithm of the density of sum_k lambda_k g_k^2 at t, g_k standard normal: the inverse
    Laplace transform of prod_k (1 + 2 p lambda_k)^(-1/2) on a parabola through its saddle point.
    """
    values, counts = np.unique(values, return_counts=True)
    top = values.max()
    gap = 1.0 - values / top
    # mu > 0 with sum_k lambda_k / q_k = t, by bisection of its logarithm: a few digits suffice
    low, high = np.log(0.25 / t), np.log(2.0 * float(counts.sum()) / t + 1e-300)
    for _ in range(40):
        middle = 0.5 * (low + high)
        q = gap + 2.0 * np.exp(middle)[:, None] * values
        above = values / q @ counts > t
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    mu = np.exp(0.5 * (low + high))
    q = gap + 2.0 * mu[:, None] * values
    log_scale = (mu - 0.5 / top) * t - 0.5 * np.log(q) @ counts
    curvature = 2.0 * (values / q) ** 2 @ counts
    step = np.minimum(0.1, 0.5 / np.sqrt(4.0 * mu**2 * curvature))
    one = np.zeros_like(t)
    for k in range(int(np.ceil((np.sqrt(46.0 / (mu * t)) / step).max())) + 1):
        turn = 1.0 + 1j * k * step
        at = mu * turn**2
        log = (at - 0.5 / top) * t - 0.5 * np.log(gap + 2.0 * at[:, None] * values) @ counts
        share = step * 2.0 * mu / np.pi * turn * np.exp(log - log_scale)
        one += (0.5 if k == 0 else 1.0) * share.real
    return np.asarray(log_scale + np.log(np.maximum(one, 1e-300)))
