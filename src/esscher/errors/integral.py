"""The integrals that give the exact error of attention on sampled keys, by a trapezoid rule in
tau = log t.

One query; e_j = exp(score_j), c_j = value_j - limit, b_j = variance of the value given the key.
1/S^2 = int t exp(-tS) dt over t > 0 turns the softmax's denominator S into a product over keys.

``replacement_errors``, n keys drawn from a law of keys, with phi(t) = E exp(-te):

    E||Gamma_n - Gamma||^2 = n int t E[e^2 (|c|^2 + b) exp(-te)] phi^(n-1) dt
                             + n (n-1) int t |E[e c exp(-te)]|^2 phi^(n-2) dt
    E Gamma_n - Gamma      = n int E[e c exp(-te)] phi^(n-1) dt
    E sum_j p_j^2          = n int t E[e^2 exp(-te)] phi^(n-1) dt

Each key kept with its own probability p_j and then counted w_j times (esscher.errors.doubling;
``bernoulli_errors``: one p for all keys, none of them sure, w = 1): eps_j = w_j e_j, x_j = exp(-t
eps_j), D_j = 1 - p_j + p_j x_j, g_j = p_j eps_j x_j / D_j. Sure keys (p = 1) are two numbers of a
query, S = sum eps_j and M = sum eps_j c_j. With P = exp(-tS) prod_j D_j, and sums and products over
the other keys:

    E||Gamma_keep - Gamma||^2 = int t P ( |M + sum_j g_j c_j|^2
                                          + sum_j p_j (1-p_j) eps_j^2 x_j / D_j^2 |c_j|^2 ) dt
    E Gamma_keep - Gamma      = int P (M + sum_j g_j c_j) dt
    E sum_j (weight)^2        = int t P (sum_sure eps_j^2 + sum_j p_j eps_j^2 x_j / D_j) dt

where no kept key counts as no error. Every functional is a sum over keys of a kernel of u = tau +
score. Both errors are integrals of E[|sum e c|^2 t^2 exp(-tS)] over tau, averages of positive bumps
of one shape: the trapezoid rule of step H is wrong by a relative 2 sum_k |Gamma(2 + 2 pi i k / H)|
at most (Poisson summation). What is cut off at both ends is bounded by ``below`` and ``above``:
beyond T it is E[|Gamma_n - Gamma|^2 (1 + TS) exp(-TS)] <= 2 max |c|^2 E exp(-TS/2).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from esscher.attention.head import Head
from esscher.errors.curve import QueryErrors, check_sampling, concatenate, side_by_side
from esscher.inputs import as_counts
from esscher.measures.line import Line

Floats = npt.NDArray[np.float64]
# (u, tau) -> name: (channel, kernel)
Family = Callable[[Tensor, Tensor], dict[str, tuple[str, Tensor]]]

HIGHEST = 6.5  # exp(-exp(6.5)) = 1e-289: larger u change nothing, and smaller numbers are slow
TINY = 1e-300
LEAST = -700.0  # logarithm of the smallest factor worth telling from 0: smaller numbers are slow


class Source(ABC):
    """Keys with weights of sum 1, seen from m queries; scores are measured from an anchor that no
    score of the query exceeds.
    """

    limit: Tensor  # Gamma, (m, d)
    mean: Tensor  # E c, (m, d)
    variance: Tensor  # E(|c|^2 + b), (m,)
    log_first: Tensor  # log E e, (m,)
    log_pair: Tensor  # log E e^2, (m,)
    log_spread: Tensor  # log E[e^2 (|c|^2 + b)], (m,)
    largest: Tensor  # of |c|^2 + b, (m,)
    span: float  # no score lies further below the anchor
    chunk: int  # nodes to ask for at once

    @property
    def delta(self) -> Tensor:
        """lim n * MSE = E[e^2 (|c|^2 + b)] / (E e)^2."""
        return torch.exp(self.log_spread - 2 * self.log_first)

    @abstractmethod
    def contract(self, tau: Tensor, family: Family) -> dict[str, Tensor]:
        """E[kernel(tau + score) x channel] for each kernel of the family, on nodes ``tau``.

        Channels "mass" 1 and "spread" |c|^2 + b give (m, nodes); "value" c gives (d, m, nodes).
        """


def aliasing(step: float) -> float:
    """2 sum_k |Gamma(2 + i y_k)|, y_k = 2 pi k / step, |Gamma(2 + iy)|^2 = (1 + y^2) pi y / sinh(pi
    y).
    """
    total = 0.0
    for k in (1, 2, 3):
        y = 2 * math.pi * k / step
        if y < 200:
            total += 2 * math.sqrt((1 + y * y) * math.pi * y / math.sinh(math.pi * y))
    return total


def step_for(tol: float) -> float:
    """The longest step, in hundredths, whose aliasing is at most ``tol``."""
    return next(step / 100 for step in range(70, 9, -1) if aliasing(step / 100) <= tol)


@runtime_checkable
class Sums(Protocol):
    """Running sums over nodes tau, and bounds on what lies beyond them."""

    def add(self, tau: Tensor) -> None: ...
    def found(self) -> Tensor: ...
    def above(self, tau: float) -> Tensor: ...
    def below(self, tau: float) -> Tensor: ...


def march(
    integral: Sums,
    start: float,
    lowest: float,
    step: float,
    tol: float,
    *,
    span: float,
    chunk: int,
) -> None:
    """Add lattice nodes upward from ``start``, then downward, until what is cut off is below
    ``tol`` of what is found.

    Whatever the bounds say, nothing is left below ``lowest``, nor where t e > exp(4) for every key.
    """
    highest, device = span + 4, integral.found().device

    def add(first: int) -> None:
        integral.add(step * torch.arange(first, first + chunk, dtype=torch.float64, device=device))

    def negligible(rest: Tensor) -> bool:
        return bool((rest <= tol * integral.found() + TINY).all())

    # on multiples of half a chunk, so that a grid meets the same nodes again
    half = chunk // 2
    origin = index = half * math.floor(min(start, highest) / (step * half))
    while True:
        add(index)
        index += chunk
        last = step * (index - 1)
        if last > highest or negligible(integral.above(last)):
            break
    index = origin
    while step * index > lowest and not negligible(integral.below(step * index)):
        index -= chunk
        add(index)


def as_numpy(x: Tensor) -> Floats:
    out: Floats = x.detach().cpu().numpy()
    return out


# ---- n keys drawn independently: one set of nodes serves every n.


def _replacement(u: Tensor, tau: Tensor) -> dict[str, tuple[str, Tensor]]:
    """Kernels 1 - exp(-e^u), exp(-e^u), e^2u exp(-e^u) and e^u exp(-e^u).

    Since E[e c] = 0, e^u may be taken from the last one: e^u (exp(-e^u) - 1). That is the smaller
    of the two below t e_max = log 2, and keeps the digits that cancel when n is large.
    """
    grown = torch.exp(u.clamp(max=HIGHEST))
    left, lost = torch.exp(-grown), torch.expm1(-grown)
    pair = grown * grown * left
    return {
        "lost": ("mass", -lost),
        "left": ("mass", left),
        "pair": ("mass", pair),
        "square": ("spread", pair),
        "single": ("value", grown * torch.where(tau <= math.log(math.log(2)), lost, left)),
    }


def replacement_errors(
    source: Source, n: Tensor, *, step: float, tol: float, details: bool = False
) -> QueryErrors:
    """The error for n keys drawn independently, every n at once. ``n``: float64, at least 1."""
    sums = _Replacement(source, n, step, details)
    most = math.log(float(n.max()))
    start = float((0.5 * math.log(2 * tol) - most - source.log_first).min())
    march(sums, start, -most - 18, step, tol, span=source.span, chunk=source.chunk)
    return sums.result((aliasing(step) + 2 * tol) / 2)


class _Replacement:
    """Running sums over nodes, for m queries and all n."""

    def __init__(self, source: Source, n: Tensor, step: float, details: bool) -> None:
        self.source, self.n, self.step, self.details = source, n, step, details
        m, width = source.limit.shape
        # integrals of square phi^(n-1), cross phi^(n-1), pair phi^(n-1), and of the first two times
        # log phi
        self.sums = n.new_zeros(m, 5, len(n))
        self.drift = n.new_zeros(m, width, len(n))
        self.log_phi = n.new_zeros(m)  # at half the t of the last node added, or before

    def add(self, tau: Tensor) -> None:
        f = self.source.contract(tau, _replacement)
        phi = f["left"].clamp_min(TINY)
        log_phi = torch.where(f["lost"] < 0.5, torch.log1p(-f["lost"].clamp(0, 0.5)), phi.log())
        # |E[e c x]|^2 <= phi E[e^2 |c|^2 x] (Cauchy-Schwarz), which rounding must not break where
        # phi underflows
        square = f["square"]
        cross = torch.minimum(f["single"].square().sum(0) / phi, square)
        rows = torch.stack([square, cross, f["pair"], square * log_phi, cross * log_phi], dim=1)
        power = self._power(log_phi) * self.step
        self.sums += rows @ power
        if self.details:
            self.drift += f["single"].transpose(0, 1) @ power
        self.log_phi = log_phi[:, -1 - math.ceil(math.log(2) / self.step)]

    def _power(self, log_phi: Tensor) -> Tensor:
        """phi^(n-1)."""
        return torch.exp((log_phi[..., None] * (self.n - 1)).clamp_min(LEAST))

    def found(self) -> Tensor:
        square, cross, pair = self.sums[:, :3].unbind(1)
        return torch.stack([self.n * square + self.n * (self.n - 1) * cross, self.n * pair])

    def above(self, tau: float) -> Tensor:
        chance = 2 * torch.exp((self.log_phi[:, None] * self.n).clamp_min(LEAST))
        return torch.stack([chance * self.source.largest[:, None], chance])

    def below(self, tau: float) -> Tensor:
        """E[|sum e c|^2 t^2 exp(-tS)] <= t^2 n E[e^2 |c|^2], because E[e c] = 0."""
        logs = torch.stack([self.source.log_spread, self.source.log_pair])
        return self.n * torch.exp(2 * tau + logs)[:, :, None] / 2

    def result(self, accuracy: float) -> QueryErrors:
        n, source = self.n, self.source
        one = n == 1  # known without an integral
        first, cross, pair, first_log, cross_log = self.sums.unbind(1)
        slope = n * (first + n * first_log + (2 * n - 1) * cross + n * (n - 1) * cross_log)
        bias = torch.where(one, source.mean[:, :, None], n * self.drift).transpose(1, 2)
        return QueryErrors(
            mse=as_numpy(torch.where(one, source.variance[:, None], self.found()[0])),
            sum_p2=as_numpy(torch.where(one, 1.0, n * pair)),
            limit=as_numpy(source.limit),
            delta=as_numpy(source.delta),
            bias=as_numpy(bias) if self.details else None,
            dmse_dlogn=as_numpy(slope),
            accuracy=accuracy,
        )


# ---- Each key kept with one probability.


@lru_cache(maxsize=64)  # a grid remembers their samples
def _kernels_of_kept(p: float, q: float) -> tuple[Family, Family]:
    """Kernels of the integrals and of their tails below. ``q``: 1 - p.

    p (1-p) e^2 x / D^2 is g e - g^2 without the cancellation that would spoil it near p = 1. As
    sum_j e_j c_j = 0, sum_j g_j c_j = sum_j p (1-p) e_j (x_j - 1) / D_j c_j. That early form has
    the smaller terms while x > (1-p)/(2-p). Besides: derivatives p d/dp of log D and of the terms.
    """
    early = math.log(math.log((1 + q) / q))

    def inside(u: Tensor, tau: Tensor) -> dict[str, tuple[str, Tensor]]:
        grown = torch.exp(u.clamp(max=HIGHEST))
        x, lost = torch.exp(-grown), torch.expm1(-grown)
        d = q + p * x
        term = p * grown / d
        pair = term * grown * x
        single = term * torch.where(tau <= early, q * lost, x)
        rise = -p * lost / d  # -p d log D / dp
        dearly = term * lost * (q - p + q * rise)
        return {
            "log_d": ("mass", torch.where(p * lost > -0.5, torch.log1p(p * lost), d.log())),
            "pair": ("mass", pair),
            "square": ("spread", q * pair / d),
            "single": ("value", single),
            "rise": ("mass", rise),
            "dsquare": ("spread", pair / d * (q - p + 2 * q * rise)),
            "dsingle": ("value", torch.where(tau <= early, dearly, single / d)),
        }

    def below(u: Tensor, tau: Tensor) -> dict[str, tuple[str, Tensor]]:
        """What square and pair are over t^2 as t goes to 0; and of E S."""
        grown = torch.exp(u.clamp(max=HIGHEST))
        pair = p * grown * grown
        return {"square": ("spread", q * pair), "pair": ("mass", pair), "mean": ("mass", p * grown)}

    return inside, below


def bernoulli_errors(
    source: Source, n: int, of: int, keys: Tensor, *, step: float, tol: float
) -> QueryErrors:
    """The error when each key is kept with probability f = n / of; no kept key counts as no error.
    Arrays have one n.

    ``keys`` (m,): how many equal keys each query has. At f = 1 there is no error, and no slope.
    """
    if n < of:
        sums = _Kept(source, keys.double()[:, None], n / of, (of - n) / of, step)
        start = float((0.5 * math.log(2 * tol) - sums.mean.log()).min())
        lowest = -float((keys.double().log() + source.log_first).max()) - 18
        march(sums, start, lowest, step, tol, span=source.span, chunk=source.chunk)
        return sums.result((aliasing(step) + 2 * tol) / 2)
    limit = as_numpy(source.limit)
    pair = as_numpy(torch.exp(source.log_pair - 2 * source.log_first) / keys)[:, None]
    return QueryErrors(
        mse=np.zeros_like(pair),
        sum_p2=pair,
        limit=limit,
        delta=as_numpy(source.delta),
        bias=np.zeros_like(limit)[:, None],
        dmse_dlogn=np.full_like(pair, np.nan),
    )


class _Kept:
    """Running sums over nodes, for m queries and one probability."""

    def __init__(self, source: Source, keys: Tensor, p: float, q: float, step: float) -> None:
        self.source, self.keys, self.step = source, keys, step
        self.inside, start = _kernels_of_kept(p, q)
        self.sums = keys.new_zeros(3, len(keys))
        self.drift = torch.zeros_like(source.limit)
        self.chance = keys.new_ones(len(keys))  # at half the t of the last node added, or before
        f = source.contract(self.sums.new_zeros(1), start)
        self.start = torch.stack([keys * f["square"], keys * f["pair"]])[:, :, 0] / 2
        self.mean = (keys * f["mean"])[:, 0]

    def add(self, tau: Tensor) -> None:
        keys, f = self.keys, self.source.contract(tau, self.inside)
        chance = (keys * f["log_d"]).clamp_min(LEAST).exp()
        self.chance = chance[:, -1 - math.ceil(math.log(2) / self.step)]
        chance = chance * self.step
        x = f["single"].mul_(keys)
        mse = keys * f["square"] + x.square().sum(0)
        self.sums[0] += (chance * mse).sum(1)
        self.sums[1] += (chance * keys * f["pair"]).sum(1)
        cross = 2 * keys * (x * f["dsingle"]).sum(0)
        rise = keys * (f["dsquare"] - f["rise"] * mse) + cross
        self.sums[2] += (chance * rise).sum(1)
        self.drift += (x.transpose(0, 1) @ chance[:, :, None])[:, :, 0]

    def found(self) -> Tensor:
        return self.sums[:2]

    def above(self, tau: float) -> Tensor:
        largest = self.source.largest
        return 2 * self.chance * torch.stack([largest, torch.ones_like(largest)])

    def below(self, tau: float) -> Tensor:
        """E[|sum e c|^2 t^2 exp(-tS)] <= t^2 sum_j p (1-p) e_j^2 |c_j|^2."""
        return math.exp(2 * tau) * self.start

    def result(self, accuracy: float) -> QueryErrors:
        mse, sum_p2, slope = (as_numpy(row[:, None]) for row in self.sums)
        return QueryErrors(
            mse=mse,
            sum_p2=sum_p2,
            limit=as_numpy(self.source.limit),
            delta=as_numpy(self.source.delta),
            bias=as_numpy(self.drift[:, None]),
            dmse_dlogn=slope,
            accuracy=accuracy,
        )


# ---- Summed key by key, in float64: the reference path, and the engine for laws reduced to nodes
# along the tilt. A law of keys seen from a query is a list of scores s_j with weights w_j, values
# v_j and variances b_j (the variance the value still has once the key's score is known).

STEP, TOL = 0.28, 1e-13  # aliasing(0.28) is 3e-13
ELEMENTS = 2**17  # of one temporary array: a megabyte
WIDE = 300.0  # a span from which keys are sorted and only those near tau are summed
REACH = 120.0  # below -tau - REACH a key is worth exp(-REACH): nothing, even times 2**53 tokens
SHUT = 6.0  # exp(-exp(6)) = 1e-175: above -tau + SHUT every kernel has its final value


class KeySource(Source):
    """Keys of m queries: ``score`` (m, N), at most 0; mass w, spread w (|c|^2 + b), both (m, N);
    value w c, (m, d, N).
    """

    chunk = 16

    def __init__(self, score: Tensor, mass: Tensor, spread: Tensor, value: Tensor) -> None:
        self.score, self.mass, self.spread, self.value = score, mass, spread, value
        self.span = -float(torch.where(score > -torch.inf, score, 0.0).min())

    @classmethod
    def build(cls, scores: Tensor, log_weights: Tensor, values: Tensor, extra: Tensor) -> KeySource:
        """From scores, log-weights and extra variances (m, N) and values (m, N, d), in float64;
        weights sum to 1.
        """
        inside = log_weights > -math.inf
        anchor = scores.masked_fill(~inside, -math.inf).amax(1, keepdim=True)
        # a key of weight 0 is put on the anchor, where it costs no range
        score = torch.where(inside, scores - anchor, 0.0)
        # centred twice: first on the value of the heaviest key, so that neither a common offset nor
        # a limit that is nearly this value costs digits, and values that are all equal leave
        # exactly nothing
        heaviest = (log_weights + score).argmax(1)
        shift = values[torch.arange(len(values), device=values.device), heaviest][:, None]
        near = values - shift
        log_tilt = torch.logsumexp(log_weights + score, 1)
        p = torch.exp(log_weights + score - log_tilt[:, None])
        drift = (p[:, None, :] @ near).transpose(1, 2)  # limit - shift, (m, d, 1)
        c = near.transpose(1, 2) - drift
        square = c.square().sum(1) + extra
        mass = log_weights.exp()
        found = cls(score, mass, mass * square, mass[:, None, :] * c)
        found.limit = shift[:, 0] + drift[:, :, 0]
        found.mean, found.variance = found.value.sum(2), found.spread.sum(1)
        found.log_first, found.largest = log_tilt, torch.where(inside, square, 0.0).amax(1)
        found.log_pair = torch.logsumexp(log_weights + 2 * score, 1)
        found.log_spread = torch.logsumexp(log_weights + 2 * score + square.log(), 1)
        return found

    def contract(self, tau: Tensor, family: Family) -> dict[str, Tensor]:
        """Sum over keys, a few nodes at a time so that temporaries stay small."""
        rows = max(1, ELEMENTS // self.score.numel())
        parts = [self._contract(part, family) for part in torch.split(tau, rows)]
        return {name: torch.cat([part[name] for part in parts], dim=-1) for name in parts[0]}

    def _contract(self, tau: Tensor, family: Family) -> dict[str, Tensor]:
        out = {}
        u = tau[:, None] + self.score[:, None, :]  # (m, nodes, N)
        for name, (channel, kernel) in family(u, tau[:, None]).items():
            if channel == "value":
                out[name] = (self.value @ kernel.transpose(1, 2)).transpose(0, 1)
            else:
                weights = self.mass if channel == "mass" else self.spread
                out[name] = (kernel @ weights[:, :, None])[:, :, 0]
        return out


class _WideSource(Source):
    """One query whose scores span hundreds of nats: for each tau, only the keys whose kernel is not
    constant.

    Gaps longer than REACH (and the spread of the log-weights) are shortened to that: keys further
    apart never compete.
    """

    chunk = 256

    def __init__(self, keys: KeySource) -> None:
        score, order = keys.score[0].sort(descending=True)
        weights = keys.mass[0][keys.mass[0] > 0]
        self.reach = REACH + float(torch.log(weights.max() / weights.min()))
        gaps = (score[:-1] - score[1:]).clamp(max=self.reach)
        self.score = torch.cat([score[:1], score[0] - gaps.cumsum(0)])
        self.channels = keys.mass[0, order], keys.spread[0, order], keys.value[0][:, order]
        self.over = [pad(x.cumsum(-1), (1, 0)) for x in self.channels]
        self.under = [pad(x.flip(-1).cumsum(-1).flip(-1), (0, 1)) for x in self.channels]
        self.limit, self.mean, self.variance = keys.limit, keys.mean, keys.variance
        self.log_first, self.log_pair = keys.log_first, keys.log_pair
        self.log_spread, self.largest = keys.log_spread, keys.largest
        self.span = float(-self.score[-1])

    def contract(self, tau: Tensor, family: Family) -> dict[str, Tensor]:
        bounds = torch.stack([tau.min() - SHUT, tau.max() + self.reach])  # in -score, which ascends
        first, last = torch.searchsorted(-self.score, bounds.to(self.score)).tolist()
        # kernels are constant above the band and below it: a key at either infinity carries the
        # sums of all those
        mass, spread, value = (
            torch.cat(
                [over[..., first : first + 1], x[..., first:last], under[..., last : last + 1]], -1
            )[None]
            for over, x, under in zip(self.over, self.channels, self.under, strict=True)
        )
        score = pad(pad(self.score[first:last], (1, 0), value=1e9), (0, 1), value=-1e9)[None]
        return KeySource(score, mass, spread, value).contract(tau, family)


def error_from_nodes(
    scores: Any,
    log_weights: Any,
    values: Any,
    extra: Any,
    n: Any,
    *,
    sampling: str = "replacement",
    details: bool = False,
) -> QueryErrors:
    """Exact error of softmax attention on n keys drawn from weighted nodes, in float64, relative
    error about 1e-12.

    ``scores``: (m, N), row i seen by query i. ``log_weights``: (N,) or (m, N), normalised here;
    None: equal weights. ``values``: (N, d) or (m, N, d). ``extra``: variance of the value given the
    node, summed over its d coordinates, (N,) or (m, N); None for 0. ``n``: token numbers up to
    2**53. ``sampling="bernoulli"`` keeps each of the N nodes with probability n / N instead
    (equal weights, no extra; no kept key counts as no error).

    Memory is flat in m; time is m x N x (about 100 nodes, and 3.6 more per nat of score range). A
    query whose scores span more than 300 nats sums only the keys near each node: its time grows
    with N plus the range, not their product.
    """
    score = torch.as_tensor(scores, dtype=torch.float64)
    m, keys = score.shape
    value, weight, spare = (
        torch.as_tensor(x, dtype=torch.float64, device=score.device)
        for x in (
            values,
            np.zeros(keys) if log_weights is None else log_weights,
            np.zeros(keys) if extra is None else extra,
        )
    )
    counts = as_counts(n, "n")
    check_sampling(sampling, counts, keys)
    log_weight = torch.log_softmax(weight.expand(m, keys), 1)
    parts = []
    for _, source in sources(score, log_weight, value, spare.expand(m, keys)):
        if sampling == "replacement":
            drawn = torch.as_tensor(counts, dtype=torch.float64, device=score.device)
            found = replacement_errors(source, drawn, step=STEP, tol=TOL, details=details)
        else:
            own = source.limit.new_full((len(source.limit),), keys)
            columns = (
                bernoulli_errors(source, count, keys, own, step=STEP, tol=TOL)
                for count in counts.tolist()
            )
            found = side_by_side(list(columns))
        parts.append(found)
    return concatenate(parts)


def line_nodes(head: Head, lines: Sequence[Line]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores, log-weights, values and extra variances of a law's nodes along one tilt."""
    return (
        torch.cat([line.scores for line in lines]),
        torch.cat([line.log_weights for line in lines]),
        head.values(torch.cat([line.means for line in lines])),
        torch.cat([line.extra(head.V.double()) for line in lines]),
    )


def sources(
    score: Tensor, log_weight: Tensor, value: Tensor, extra: Tensor
) -> Iterator[tuple[slice, Source]]:
    """Some queries at a time, a wide one alone: scores, log-weights, extra (m, N), values (N, d) or
    (m, N, d), in float64.
    """
    spans = (score.amax(1) - score.amin(1)).tolist()
    group = max(1, ELEMENTS // (16 * score.shape[1]))
    i = 0
    while i < len(spans):
        j = i + 1
        while j < min(i + group, len(spans)) and spans[i] <= WIDE and spans[j] <= WIDE:
            j += 1
        own = value[i:j] if value.ndim == 3 else value.expand(j - i, -1, -1)
        near = KeySource.build(score[i:j], log_weight[i:j], own, extra[i:j])
        yield slice(i, j), _WideSource(near) if spans[i] > WIDE else near
        i = j


# ---- Errors of two heads on one random set of keys: they lose the same keys, so that their
# errors are correlated.

PAIR_STEP = 0.4  # of log s and log t: the trapezoid rule converges geometrically
SMALL, LARGE = 1e-9, 45.0  # where s S begins and where exp(-s S) ends


def pair_error(
    scores: tuple[Float[Tensor, " n"], Float[Tensor, " n"]],
    centred: tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]],
    probability: Float[Tensor, " n"],
    weight: Float[Tensor, " n"] | None = None,
    *,
    step: float = PAIR_STEP,
) -> float:
    """E <e_1, e_2> of one query of each head; ``centred``: values minus the limit, in one space."""
    p = probability.double()
    seen = p > 0
    p = p[seen]
    w = torch.ones_like(p) if weight is None else weight.double()[seen]
    eps, phi = (w * torch.exp(one.double()[seen] - one.double()[seen].max()) for one in scores)
    c, d = (values.double()[seen] for values in centred)
    inner = (c * d).sum(1)
    total = 0.0
    across = _pair_nodes(phi, p, step)
    for s in _pair_nodes(eps, p, step).tolist():
        decay = p * torch.exp(-s * eps - across[:, None] * phi)  # (nodes, n)
        denominator = 1 - p + decay
        g = decay / denominator
        first, second = (g * eps) @ c, (g * phi) @ d
        inside = (first * second).sum(1) + (g * (1 - g) * (eps * phi)) @ inner
        product = torch.log(denominator).sum(1).exp()
        total += s * float((across * product * inside).sum())
    return step * step * total


def _pair_nodes(eps: Tensor, p: Tensor, step: float) -> Tensor:
    """From well below 1 / E S to where exp(-s S) is gone, whichever keys are kept: with sure keys
    that is sooner.
    """
    sure = float(eps[p == 1].sum())
    end = LARGE / (sure if sure > 0 else float(eps.min()))
    first = math.log(SMALL / float((p * eps).sum()))
    return torch.exp(
        torch.arange(first, math.log(end) + step, step, dtype=torch.float64, device=eps.device)
    )
