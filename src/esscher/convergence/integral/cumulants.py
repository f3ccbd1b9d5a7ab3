"""The integral over kept keys whose probabilities all differ, in float32: by cumulants, and a few keys by themselves.

With the weights of a query summing to 1, integral.inclusion needs, at each t, sums over the keys that chance decides of
log D_j and its derivatives in t. Where eps_j is small against what is kept, log D_j is a short series in the cumulants K_k of
a coin that falls with probability p_j,

    log D_j = sum_k f_k K_k(p_j) eps_j^k,   g_j = sum_k f_(k-1) K_k eps_j^k,   g_j eps_j - g_j^2 = sum_k f_(k-2) K_k eps_j^k

with f_k = (-t)^k / k!, so that the sums of K_k eps^k, times 1, c, |c|^2 and eps, hold for every t: a few products of matrices.
The other keys are summed by themselves at each t. What the series' last term adds, where the integrand lies, is the stated
accuracy; a query that leaves too many keys outside, or too large a last term, is not answered here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from esscher.convergence.integral.formulas import TINY, aliasing, step_for
from esscher.convergence.integral.inclusion import InclusionErrors

__all__ = ["Answered", "cumulant_errors"]

REACH = ((3, 0.004), (4, 0.012), (6, 0.04), (8, 0.08))  # terms of a series, and the largest eps it is for
FEW, MANY = 48, 1024  # keys of a query that may stay outside of the series; the same for the queries that FEW do not do
TOL = 2e-5
ROUNDING = 1e-6  # of p w in float32: below it p w is 1
DOUBTFUL = 0.1  # a last term of log P so large says that the series has no more to say
EDGE = 5.0  # what lies above the last node, relative to what that adds
NODES = 40
ELEMENTS = 2**22  # queries x nodes x keys outside in one temporary
LOWEST, HIGHEST = -7.0, 3.9  # of log t, measured from 1 / what all keys and what those of the series keep on average


@dataclass(frozen=True)
class Answered:
    """The errors of those queries (m,) that ``known`` marks; the others' numbers mean nothing."""

    errors: InclusionErrors
    known: Tensor


def cumulant_errors(weight: Tensor, near: Tensor, drift: Tensor, distance: Tensor, p: Tensor, w: Tensor | None) -> Answered:
    """float32: softmax weights (m, N), values (N, d) and limits (m, d) from one origin, |c| (m, N), p and w (m, N)."""
    answer = _answer(weight, near, drift, distance, p, w, FEW)
    rows = (~answer.known).nonzero()[:, 0]
    most = max(1, ELEMENTS // (MANY * NODES))
    for some in torch.split(rows, most) if len(rows) else ():
        again = _answer(weight[some], near, drift[some], distance[some], p[some], None if w is None else w[some], MANY)
        errors = answer.errors
        errors.mse[some], errors.bias[some], errors.sum_p2[some] = again.errors.mse, again.errors.bias, again.errors.sum_p2
        answer.known[some] = again.known
    return answer


def _answer(weight: Tensor, near: Tensor, drift: Tensor, distance: Tensor, p: Tensor, w: Tensor | None, few: int) -> Answered:
    eps = weight if w is None else weight * w
    by_chance = (p > 0) & (p < 1)
    terms, inside = _reach(eps, p * eps, by_chance, few)
    # As sum pi c = 0, B = sum p eps c is that of (p w - 1) pi c too, which has no digits to lose where the rule reweights.
    lack = (p if w is None else p * w) - 1
    lacking = torch.where(lack.abs() > ROUNDING, lack * weight, 0.0)
    first = (lacking @ near).double() - lacking.sum(1, keepdim=True).double() * drift.double()
    series = _Series(eps, near, drift, distance, p, inside, terms)
    outside = _Outside(eps, near, drift, distance, p, by_chance & ~inside, few)
    return _integral(series, outside, first)


def _reach(eps: Tensor, mean: Tensor, by_chance: Tensor, few: int) -> tuple[int, Tensor]:
    """The shortest series that leaves few keys of every query outside, and which it has. ``mean``: p eps."""
    for terms, largest in REACH:
        inside = by_chance & (eps <= largest * mean.sum(1, keepdim=True))
        for _ in range(2):  # the series is measured against what it keeps itself
            kept = torch.where(by_chance & ~inside, 0.0, mean).sum(1, keepdim=True)
            inside &= eps <= largest * kept
        if terms == REACH[-1][0] or int((by_chance & ~inside).sum(1).max()) <= few // 2:
            break
    return terms, inside


def _coin(p: Tensor, terms: int) -> list[Tensor | float]:
    """Cumulants of a coin, over p (1 - p): K_2, K_3, ... ; K_(k+1) = p (1 - p) dK_k/dp."""
    q, odd = p * (1 - p), 1 - 2 * p
    found: list[Tensor | float] = [1.0, odd]
    if terms > 3:
        found.append(1 - 6 * q)
    if terms > 4:
        found += [odd * (1 - 12 * q), 1 - 30 * q + 120 * q * q]
    if terms > 6:
        found += [odd * (1 - 60 * q + 360 * q * q), 1 - 126 * q + 1680 * q * q - 5040 * q * q * q]
    return found


class _Series:
    """Sums of K_k eps^k over the keys inside, k = 2 .. terms: times 1, |c|^2, eps (m, terms - 1), and c (m, terms - 1, d)."""

    def __init__(
        self, eps: Tensor, near: Tensor, drift: Tensor, distance: Tensor, p: Tensor, inside: Tensor, terms: int
    ) -> None:
        sure_or_inside = torch.where((p == 1) | inside, p * eps, 0.0)
        self.kept = sure_or_inside.sum(1).double()
        self.pair = (sure_or_inside * eps).sum(1).double()
        rows = torch.empty(len(p), terms - 1, p.shape[1], dtype=p.dtype, device=p.device)
        power = torch.where(inside, p * (1 - p) * eps * eps, 0.0)
        for i, factor in enumerate(_coin(p, terms)):
            torch.mul(power, factor, out=rows[:, i])
            power = power * eps if i < terms - 2 else power
        each = torch.stack([torch.ones_like(p), distance.square(), eps], dim=2)
        self.mass, self.spread, self.pairs = (rows @ each).double().unbind(2)
        vectors = (rows.flatten(0, 1) @ near).reshape(len(p), terms - 1, -1)
        self.vectors = vectors.double() - self.mass[:, :, None] * drift[:, None]


class _Outside:
    """The keys of each query that are summed by themselves, at most ``few`` of them: (m, r)."""

    def __init__(
        self, eps: Tensor, near: Tensor, drift: Tensor, distance: Tensor, p: Tensor, outside: Tensor, few: int
    ) -> None:
        count = outside.sum(1)
        self.known = count <= few
        found = outside.int().topk(min(int(count.max()), few), dim=1).indices
        some = outside.gather(1, found)
        self.p = torch.where(some, p.gather(1, found), 0.0).double()[:, None]
        self.eps = torch.where(some, eps.gather(1, found), 0.0).double()[:, None]
        self.square = distance.gather(1, found).double().square()[:, None]
        self.c = near[found].double() - drift[:, None]
        self.mean = (self.p * self.eps).sum(2)[:, 0]

    def at(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """log D, (g - p eps) c, (g eps - g^2) |c|^2 and g eps, summed, at ``t`` (m, nodes)."""
        y = t[:, :, None] * self.eps
        x, lost = torch.exp(-y), torch.expm1(-y)
        d = 1 + self.p * lost
        g = self.p * self.eps * x / d
        late = self.p * (1 - self.p) * self.eps * lost / d
        return d.log().sum(2), late @ self.c, ((1 - self.p) * g * self.eps / d * self.square).sum(2), (g * self.eps).sum(2)


def _integral(series: _Series, outside: _Outside, first: Tensor) -> Answered:
    step = step_for(TOL)
    kept = series.kept.clamp_min(TINY)
    low, high = LOWEST - (kept + outside.mean).log(), HIGHEST - kept.log()
    nodes = min(NODES, math.ceil(float((high - low).max()) / step) + 1)
    t = (low[:, None] + step * torch.arange(nodes, dtype=torch.float64, device=low.device)).exp()  # (m, nodes)
    terms = series.mass.shape[1] + 1
    order = torch.arange(1, terms + 1, dtype=torch.float64, device=t.device)
    f = torch.cat([torch.ones_like(t)[:, :, None], (-t[:, :, None] / order).cumprod(2)], dim=2)  # f_0 .. f_terms
    last = f[:, :, -1] * series.mass[:, None, -1]
    log_d, vector, spread, pairs = outside.at(t)
    log_p = log_d - t * kept[:, None] + (f[:, :, 2:] @ series.mass[:, :, None])[:, :, 0]
    vector = vector + first[:, None] + f[:, :, 1:-1] @ series.vectors
    spread = spread + (f[:, :, :-2] @ series.spread[:, :, None])[:, :, 0]
    pairs = pairs + series.pair[:, None] + (f[:, :, 1:-1] @ series.pairs[:, :, None])[:, :, 0]
    good = (last.abs() <= DOUBTFUL).double().cumprod(1)  # beyond the first doubtful node nothing is believed
    chance = step * t * log_p.clamp(max=0).exp() * good
    each = t * chance * (vector.square().sum(2) + spread)
    mse = each.sum(1)
    rest = t[:, :1] * step / math.expm1(step)  # of the bias, below the lowest node: a geometric series
    bias = (chance[:, :, None] * vector).sum(1) + rest * first
    edge = each.gather(1, (good.sum(1, keepdim=True).long() - 1).clamp_min(0))[:, 0]
    cut = (each * last).abs().sum(1) + EDGE * edge.abs() + each[:, 0].abs()
    size = torch.where(mse > 0, mse, 1.0)
    known = outside.known & (cut <= TOL * size) & (high <= t[:, -1].log() + step)
    accuracy = aliasing(step) / 2 + TOL
    return Answered(InclusionErrors(mse, bias, (t * chance * pairs).sum(1), accuracy), known)
