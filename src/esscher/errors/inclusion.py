"""The integral for keys kept with probabilities and weights of their own: any keep rule.

e_j = exp(score_j), c_j = value_j - limit, each key kept with probability p_j and then counted w_j
times; eps_j = w_j e_j, x_j = exp(-t eps_j), D_j = 1 - p_j + p_j x_j, g_j = p_j eps_j x_j / D_j.
Sure keys (p = 1) are two numbers of a query, S = sum eps_j and M = sum eps_j c_j. With P = exp(-t
S) prod_j D_j, products and sums over the others,

    E||Gamma_keep - Gamma||^2  = int t P ( |M + sum_j g_j c_j|^2 + sum_j p_j (1-p_j) eps_j^2 x_j
        / D_j^2 |c_j|^2 ) dt
    E Gamma_keep - Gamma       = int P (M + sum_j g_j c_j) dt
    E sum_j (softmax weight)^2 = int t P (sum_sure eps_j^2 + sum_j p_j eps_j^2 x_j / D_j) dt

where no kept key counts as no error. Trapezoid rule in log t, and its error, as in
integral.formulas. The vector may lose its digits while t is small (reweighted by 1/p, M + sum_j p_j
eps_j c_j = 0 exactly); B = M + sum_j p_j eps_j c_j taken out,

    M + sum_j g_j c_j = B + sum_j p_j (1-p_j) eps_j (x_j - 1) / D_j c_j,

and of the two ways to sum it the one with the smaller terms is taken at each t.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esscher.errors.formulas import HIGHEST, aliasing, march, step_for
from esscher.keep.context import Context
from esscher.keep.rule import first_of

TOL = 1e-13
ELEMENTS = 2**21  # queries x keys x nodes in one temporary
LEAST = -700.0
FAR = 700.0  # exp(FAR) is a number still


@dataclass(frozen=True)
class InclusionErrors:
    """Of each query: mean squared error (m,), bias (m, d), E sum p^2 (m,); relative ``accuracy`` of
    the root.
    """

    mse: Tensor
    bias: Tensor
    sum_p2: Tensor
    accuracy: float

    def take(self, rows: Tensor) -> InclusionErrors:
        """Those of some queries."""
        return InclusionErrors(self.mse[rows], self.bias[rows], self.sum_p2[rows], self.accuracy)


def joined(parts: Sequence[InclusionErrors], order: Tensor | None = None) -> InclusionErrors:
    """Results of disjoint groups of queries as one; ``order``: the place of each query among
    them.
    """
    mse, bias, sum_p2 = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("mse", "bias", "sum_p2")
    )
    if order is not None:
        mse, bias, sum_p2 = mse[order], bias[order], sum_p2[order]
    return InclusionErrors(mse, bias, sum_p2, max(part.accuracy for part in parts))


@dataclass(frozen=True)
class SureKeys:
    """Sums over the sure keys of each query; e is what a key counts, measured from an anchor of the
    query.
    """

    total: Tensor  # of e, (m,)
    pair: Tensor  # of e^2, (m,)
    vector: Tensor  # of e c, (m, d)
    spread: Tensor  # of |c|^2, (m,)
    count: Tensor  # (m,)

    @classmethod
    def of(
        cls, sure: Tensor, log_e: Tensor, v: Tensor, limit: Tensor, distance: Tensor
    ) -> SureKeys:
        """``sure``, ``log_e`` and ``distance`` |c| (m, N); ``v`` (N, d) and ``limit`` (m, d) from
        one origin.
        """
        e = torch.where(sure, log_e, -torch.inf).exp()
        total = e.sum(1)
        spread = torch.where(sure, distance.square(), 0.0).sum(1)
        return cls(
            total, e.square().sum(1), e @ v - total[:, None] * limit, spread, sure.sum(1).double()
        )


class Sums:
    """Running sums over nodes of an integral over kept keys, and where its nodes lie; it knows its
    own reach.

    ``log_total``: logarithm of what the sure keys of each query sum to; ``first``: B; ``log_most``:
    logarithm of the largest S.
    """

    chunk = 16

    def __init__(self, log_total: Tensor, first: Tensor, log_most: float, step: float) -> None:
        self.log_total, self.first, self.log_most, self.step = log_total, first, log_most, step
        self.sums = torch.zeros(2, len(first), dtype=torch.float64, device=first.device)
        self.drift = torch.zeros_like(first)
        self.bottom = math.inf  # the lowest node added

    def lightest(self) -> Tensor:
        """Logarithm of the smallest S of a query that keeps no key surely."""
        raise NotImplementedError

    @property
    def span(self) -> float:
        """How far below the anchor the logarithm of the smallest S lies: that of the sure keys, or
        of one key alone.
        """
        least = torch.where(self.log_total > -torch.inf, self.log_total, self.lightest())
        return -float(least.clamp(max=0).min())

    def add(self, tau: Tensor) -> None:
        raise NotImplementedError

    def found(self) -> Tensor:
        return self.sums

    def above(self, tau: float) -> Tensor:
        raise NotImplementedError

    def below(self, tau: float) -> Tensor:
        raise NotImplementedError

    def integrate(self, tol: float) -> InclusionErrors:
        """The march over all nodes. Below the lowest the bias has t B left, a geometric series; the
        squares have t^2 of it.
        """
        march(
            self, self, 0.5 * math.log(2 * tol) - self.log_most, -self.log_most - 18, self.step, tol
        )
        rest = math.exp(self.bottom) * self.step / math.expm1(self.step)
        return InclusionErrors(
            self.sums[0],
            self.drift + rest * self.first,
            self.sums[1],
            aliasing(self.step) / 2 + tol,
        )


def inclusion_error(
    scores: Tensor,
    values: Tensor,
    probability: Tensor,
    weight: Tensor | None = None,
    *,
    tol: float = TOL,
) -> InclusionErrors:
    """Key by key, in float64: ``scores``, ``probability``, ``weight`` (m, N), ``values`` (N, d).

    A key that a query does not see has the score -inf and probability 0. A query that keeps no key
    counts as no error.
    """
    rows = max(1, ELEMENTS // (8 * scores.shape[1]))
    centre = values[len(values) // 2].double()
    near = values.double() - centre  # a large common offset costs no digits
    parts = []
    for at in range(0, len(scores), rows):
        part = slice(at, at + rows)
        limit = torch.softmax(scores[part], 1) @ near
        weights = None if weight is None else weight[part]
        parts.append(_rows(scores[part], near, limit, probability[part], weights, tol))
    return joined(parts)


def _rows(
    s: Tensor, v: Tensor, limit: Tensor, p: Tensor, w: Tensor | None, tol: float
) -> InclusionErrors:
    some = p > 0
    log_eps = torch.where(some, s if w is None else s + torch.where(some, w, 1.0).log(), -torch.inf)
    anchor = log_eps.amax(1, keepdim=True)
    log_eps = log_eps - torch.where(anchor > -torch.inf, anchor, 0.0)
    distance = torch.cdist(limit, v, compute_mode="donot_use_mm_for_euclid_dist")
    # measured from the largest of the sure keys, which may lie far below the largest of all
    highest = torch.where(p == 1, log_eps, -torch.inf).amax(1)
    highest = torch.where(highest > -torch.inf, highest, 0.0)
    sure = SureKeys.of(p == 1, log_eps - highest[:, None], v, limit, distance)
    if not bool(((p > 0) & (p < 1)).any()):
        return _softmax(sure)
    return _Included(log_eps, v, limit, p, distance, sure, highest, step_for(tol)).integrate(tol)


def _softmax(sure: SureKeys) -> InclusionErrors:
    """No chance: softmax over what is kept."""
    total = torch.where(sure.total > 0, sure.total, 1.0)
    bias = sure.vector / total[:, None]
    return InclusionErrors(bias.square().sum(1), bias, sure.pair / total.square(), 0.0)


class _Included(Sums):
    """For a few queries, key by key."""

    def __init__(
        self,
        log_eps: Tensor,
        v: Tensor,
        limit: Tensor,
        p: Tensor,
        distance: Tensor,
        sure: SureKeys,
        highest: Tensor,
        step: float,
    ) -> None:
        """``highest`` (m,): the anchor of ``sure``."""
        by_chance = (p > 0) & (p < 1)
        rest = by_chance.any(0).nonzero()[:, 0]  # keys that chance decides for some query
        self.p = torch.where(by_chance, p, 0.0)[:, rest]
        self.log_eps = torch.where(self.p > 0, log_eps[:, rest], -torch.inf)
        self.distance, self.near, self.gamma, self.sure = distance[:, rest], v[rest], limit, sure
        self.highest, above = highest, log_eps - highest[:, None]
        self.size = (torch.where(p == 1, above, -torch.inf).exp() * distance).sum(1)
        eps, scale = self.log_eps.exp(), highest.exp()
        once = self.p * eps
        first = scale[:, None] * sure.vector + once @ self.near - once.sum(1, keepdim=True) * limit
        self.second = first.square().sum(1) + (
            (1 - self.p) * once * eps * self.distance.square()
        ).sum(1)
        self.pair = scale.square() * sure.pair + (once * eps).sum(1)
        log_most = float((scale * sure.total + eps.sum(1)).max().clamp_min(1e-300).log())
        super().__init__(highest + sure.total.log(), first, log_most, step)

    def lightest(self) -> Tensor:
        return torch.where(self.log_eps > -torch.inf, self.log_eps, torch.inf).amin(1)

    def add(self, tau: Tensor) -> None:
        self.bottom = min(self.bottom, float(tau.min()))
        rows = max(1, ELEMENTS // max(1, self.p.numel()))
        for nodes in torch.split(tau, rows):
            self._add(nodes)

    def _add(self, tau: Tensor) -> None:
        t, p = tau.clamp(max=FAR).exp(), self.p[:, None]  # (m, 1, N)
        of_sure = (tau + self.highest[:, None]).clamp(max=HIGHEST).exp()  # t in units of ``sure``
        # t eps, (m, nodes, N)
        y = torch.exp((tau[:, None] + self.log_eps[:, None]).clamp(max=HIGHEST))
        x, lost = torch.exp(-y), torch.expm1(-y)
        d = (1 - p) + p * x
        log_d = torch.where(p * lost > -0.5, torch.log1p(p * lost), d.log()).sum(2)
        total = self.sure.total[:, None]
        chance = torch.exp((log_d - of_sure * total).clamp_min(LEAST)) * self.step
        late = p * y * x / d
        early = p * (1 - p) * y * lost / d
        far = self.distance[:, None]
        is_late = of_sure * self.size[:, None] + (late * far).sum(2) < t * self.first.norm(dim=1)[
            :, None
        ] - (early * far).sum(2)
        is_late |= tau + self.log_eps.amax(1, keepdim=True) > HIGHEST  # y was cut there, t was not
        terms = torch.where(is_late[:, :, None], late, early)
        base = torch.where(
            is_late[:, :, None],
            of_sure[:, :, None] * self.sure.vector[:, None],
            t[:, None] * self.first[:, None],
        )
        vector = base + terms @ self.near - terms.sum(2, keepdim=True) * self.gamma[:, None]
        pairs = p * y * y * x / d
        spread = ((1 - p) * pairs / d * far.square()).sum(2)
        mse = vector.square().sum(2) + spread
        sum_p2 = of_sure.square() * self.sure.pair[:, None] + pairs.sum(2)
        self.sums += torch.stack([(chance * mse).sum(1), (chance * sum_p2).sum(1)])
        self.drift += (chance[:, :, None] * vector).sum(1)

    def above(self, tau: float) -> Tensor:
        """E[|Gamma_keep - Gamma|^2 (1 + tS) exp(-tS)] <= 2 P(t/2) times a sum of |c|^2: sure keys,
        and others times p x / D.
        """
        half = torch.exp((tau + self.log_eps).clamp(max=HIGHEST)) / 2
        x = torch.exp(-half)
        d = 1 - self.p + self.p * x
        log_d = torch.log1p(self.p * torch.expm1(-half)).where(half < 0.5, d.log()).sum(1)
        of_sure = (tau + self.highest).clamp(max=HIGHEST).exp()
        chance = 2 * torch.exp((log_d - of_sure / 2 * self.sure.total).clamp_min(LEAST))
        kept = self.p * x / d
        return chance * torch.stack(
            [
                self.sure.spread + (kept * self.distance.square()).sum(1),
                self.sure.count + kept.sum(1),
            ]
        )

    def below(self, tau: float) -> Tensor:
        return math.exp(2 * tau) / 2 * torch.stack([self.second, self.pair])


# ---- Attention on the first n keys of a ranking, for every n of a ladder: no chance, no
# integral.

# torch says once that the format is young; of it only products with dense matrices are used
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0, 1], [0], [1.0])


def ranked_errors(
    context: Context, held: Tensor, ranking: Tensor, counts: Tensor, sure: Tensor
) -> list[InclusionErrors]:
    """One result for each of ``counts`` (S,): keys kept in all, the ``held`` (m, N) and then the
    first of the ``ranking``. ``sure`` (m,): how many of the held count among them.

    ``ranking`` (1, N) or (m, N): indices of the keys, the first to be kept first.
    """
    order = counts.argsort()
    steps = _Steps(context, held, ranking, counts[order], sure)
    kept = steps.sums[:, :-1].cumsum(1) + steps.held[:, None]  # (m, S, channels)
    dropped = steps.sums.flip(1).cumsum(1).flip(1)[:, 1:]
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
    faint = ((mass < 1e4 * least**0.5) | ((light < 1e8 * least) & steps.drops)).any(1).nonzero()
    rows = faint[:, 0]
    if len(rows):
        own = _one_by_one(
            context.take(rows), held[rows], ranking.expand(len(held), -1)[rows], counts[order]
        )
        bias[rows], pair[rows] = own
    accuracy = 32 * torch.finfo(context.dtype).eps
    found = [
        InclusionErrors(bias[:, i].square().sum(1), bias[:, i], pair[:, i], accuracy)
        for i in range(len(counts))
    ]
    return [found[i] for i in order.argsort().tolist()]


def _one_by_one(
    context: Context, held: Tensor, ranking: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Bias (m, S, d) and sum p^2 (m, S) from the logarithm of what each set weighs."""
    place = torch.empty_like(ranking).scatter_(
        1, ranking, -torch.arange(ranking.shape[1]).to(ranking).expand_as(ranking)
    )
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


class _Steps:
    """Sums of pi (value, 1, pi) over the keys between two n, (m, S + 1, d + 2), and over those
    held, (m, d + 2).
    """

    def __init__(
        self, context: Context, held: Tensor, ranking: Tensor, counts: Tensor, sure: Tensor
    ) -> None:
        weight, near = context.attention.to(context.dtype), context.near.to(context.dtype)
        rows = torch.cat([near, torch.ones_like(near[:, :1])], dim=1)
        m, keys = weight.shape
        free = context.visible & ~held
        self.held = torch.zeros(m, rows.shape[1] + 1, dtype=torch.float64, device=weight.device)
        if bool(held.any()):
            kept = torch.where(held, weight, 0.0)
            self.held = torch.cat([kept @ rows, kept.square().sum(1, keepdim=True)], dim=1).double()
        columns = ranking.expand(m, keys)
        weights = weight.gather(1, columns)
        total = free.sum(1)
        if not bool(free.all()):
            inside = free.gather(1, columns)
            columns, weights = columns[inside], weights[inside]
        ends = torch.minimum((counts - sure[:, None]).clamp_min(0), total[:, None])  # (m, S)
        ends = torch.cat([ends, total[:, None]], dim=1)
        self.drops = ends[:, :-1] < total[:, None]  # whether a key is dropped, (m, S)
        starts = torch.cumsum(total, 0) - total
        edges = torch.cat([torch.zeros_like(ends[:1, 0]), (starts[:, None] + ends).flatten()])
        weights = weights.flatten()
        sums = _sparse(edges, columns.flatten(), weights, keys) @ rows
        pairs = torch.segment_reduce(weights.square(), "sum", offsets=edges, initial=0.0)
        self.sums = (
            torch.cat([sums, pairs[:, None]], dim=1).double().reshape(m, len(counts) + 1, -1)
        )


def _sparse(edges: Tensor, columns: Tensor, weights: Tensor, width: int) -> Any:
    """32-bit indices, which the fastest products ask for."""
    shape = (len(edges) - 1, width)
    return torch.sparse_csr_tensor(
        edges.int(), columns.int(), weights, shape, check_invariants=False
    )
