"""Scores of a head: Pareto k-hat of the softmax weights, softmax statistics, and the upper tail of
the scores against that of the Gaussian of equal variance.

k-hat says how heavy the tail of the largest weights is. Attention on n tokens is self-normalised
importance sampling of its own limit, with the ratios exp(score). If the ratios' upper tail is
generalised Pareto with shape k, moments of order below 1/k are finite: k < 1/2 gives the rate
n^(-1/2), and above it the rate falls. The M largest of S ratios, M = floor(min(S/5, 3 sqrt(S))),
less the next one below, are fitted by

    density (1 + k x / sigma)^(-1/k - 1) / sigma,      k-hat = (M k + 10/2) / (M + 10),

k the posterior mean of Zhang and Stephens (Technometrics 51, 2009, 316-325), shrunk by a prior
worth ten weights at 1/2: Pareto smoothed importance sampling (Vehtari, Simpson, Gelman, Yao, Gabry,
JMLR 25(72), 2024), whose thresholds are used: good up to min(1 - 1/log10 S, 0.7), bad up to 1, very
bad above. The interval is k -+ z (1 + k)/sqrt(M), the asymptotic deviation of the likelihood
estimate for k > -1/2 (Smith, Biometrika 72, 1985); it holds for a tail that is Pareto. The M + 1
largest scores of each query are a streaming state: init, update, merge, finish.

The other two come from binned masses: the deposits of keys on each query's score grid
(esscher.errors.grid, channel ``cells[-2]``). Spreading a key over ``points`` cells is a smoothing
of mean 0 and variance points spacing^2 / 12, which is taken out here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.special
import torch
from torch import Tensor

from esscher.errors import grid as deposit
from esscher.errors.grid import Deposit, Grid
from esscher.errors.integral import TINY
from esscher.errors.scatter import exponential_gain
from esscher.inputs import as_count, as_tensor

Floats = npt.NDArray[np.float64]

GRID = 30  # posterior nodes, and sqrt(M) more [Zhang, Stephens]
PRIOR_SCALE = 3.0  # of the prior's scale, in quartiles of the tail [the same]
PRIOR_WEIGHTS, PRIOR_SHAPE = 10.0, 0.5  # the prior of k-hat, in weights [Vehtari et al.]
FEWEST = 5  # exceedances below which no shape is given
NORMAL = float(scipy.special.ndtri(0.975))  # of 95 % intervals
USUAL = 0.7
BAD = 1.0  # the mean of the ratios is infinite from here on
SURVIVAL_AT = np.arange(1.0, 9.0)
GAUSSIAN_SURVIVAL = scipy.special.ndtr(-SURVIVAL_AT)
HEAVIER, LIGHTER = 2.0, 0.5  # survival over the Gaussian's beyond which tails differ
EXPECTED = 10.0  # keys a Gaussian leaves beyond the point where tails are compared
RESOLVED = 2.0  # cells per standard deviation that a query needs for its tail to be seen


# ---- k-hat of softmax weights


@dataclass(frozen=True)
class TopScores:
    """State: the ``keep`` largest scores of each query, in falling order, and how many keys it has
    seen.
    """

    keep: int
    count: Tensor  # (m,) int64
    scores: Tensor  # (m, at most keep) float64; a query that has seen fewer keys ends in -inf


@dataclass(frozen=True)
class TailFit:
    """k-hat of each query's weights with its interval, (m,); NaN where the largest weights are all
    alike or too few. ``label``: of the median query, good, bad, very bad or unknown.
    """

    khat: Floats
    low: Floats
    high: Floats
    threshold: float  # good up to here
    label: str

    @property
    def median(self) -> float:
        """k-hat of the median query."""
        return _median(self.khat)

    @property
    def interval(self) -> tuple[float, float]:
        """Medians of the ends. Queries share their keys, so that more of them do not make it
        narrower.
        """
        return _median(self.low), _median(self.high)


def tail_length(total: Any) -> int:
    """M = floor(min(S/5, 3 sqrt(S))), the number of weights that count as the tail."""
    count = as_count(total, "total")
    return min(count // 5, math.isqrt(9 * count))


def khat_threshold(total: Any) -> float:
    """min(1 - 1/log10 S, 0.7): beyond it S weights are too few for a usable estimate [Vehtari et
    al.].
    """
    total = as_count(total, "total")
    return min(1.0 - 1.0 / math.log10(total), USUAL) if total > 1 else -math.inf


def init(queries: int, keep: int, *, device: Any = None) -> TopScores:
    """The state before any key. For S keys in all, the fit needs ``keep`` = tail_length(S) + 1."""
    count = torch.zeros(queries, dtype=torch.int64, device=device)
    return TopScores(as_count(keep, "keep"), count, count.new_empty(queries, 0).double())


def update(state: TopScores, scores: Tensor) -> TopScores:
    """The state after one more block of scores (m, B); -inf: a key that a query does not see."""
    if scores.ndim != 2 or scores.shape[0] != state.scores.shape[0]:
        raise ValueError(
            f"scores: expected {state.scores.shape[0]} rows, got shape {tuple(scores.shape)}"
        )
    block = scores.topk(min(state.keep, scores.shape[1]), dim=1).values.double()
    return merge(state, TopScores(state.keep, (scores > -math.inf).sum(1).to(state.count), block))


def merge(a: TopScores, b: TopScores) -> TopScores:
    """The state over the union of two disjoint sets of keys, seen by the same queries."""
    top = torch.cat([a.scores, b.scores], dim=1)
    if a.scores.shape[1] and b.scores.shape[1]:
        top = top.topk(min(a.keep, top.shape[1]), dim=1).values
    return replace(a, count=a.count + b.count, scores=top)


def finish(state: TopScores) -> TailFit:
    """k-hat of every query over all keys it has seen: the tail and its length are the query's own.

    Threshold and label are for the mean number of keys.
    """
    counts = state.count.cpu().numpy()
    if not counts.size or counts.min() == 0:
        raise ValueError("finish: a query of the state has seen no key; update it first")
    shape, size, khat = np.empty((3, counts.size))
    totals, place = np.unique(counts, return_inverse=True)
    lengths = np.array([tail_length(total) for total in totals.tolist()])[place]
    # queries whose tails are as long are fitted together
    for length in np.unique(lengths).tolist():
        own = lengths == length
        rows = state.scores[torch.from_numpy(own).to(state.scores.device)]
        rows = rows[:, torch.isfinite(rows).all(0)]
        fit = _fit_rows(rows.double().cpu().numpy(), min(length, rows.shape[1] - 1))
        shape[own], size[own], khat[own] = fit
    half = NORMAL * np.maximum(1.0 + shape, 0.5) / np.sqrt(size)
    threshold = khat_threshold(round(float(counts.mean())))
    middle, label = _median(khat), "unknown"
    if not math.isnan(middle):
        label = "good" if middle <= threshold else "bad" if middle <= BAD else "very bad"
    return TailFit(khat, shape - half, shape + half, threshold, label)


def gaussian_khat(s: Any, total: Any) -> Floats:
    """k-hat that ``total`` Gaussian scores of standard deviation ``s`` (a number or (m,)) show: the
    fit of their quantiles.

    A Gaussian score has lognormal weights, whose k is 0 in the far tail, yet of finitely many the
    largest look heavy once s nears sqrt(log S). A k-hat far above this one is not the work of s
    alone.
    """
    total = as_count(total, "total")
    deviation = np.atleast_1d(as_tensor(s, "s").detach().double().cpu().numpy())
    rank = np.arange(1, tail_length(total) + 2)
    z = -scipy.special.ndtri((rank - 0.5) / total)
    return _fit_rows(deviation[:, None] * z, len(rank) - 1)[2]


def _fit_rows(rows: Floats, tail: int) -> tuple[Floats, Floats, Floats]:
    """Shape k of each row's ``tail`` largest weights above the next, how many of them there were,
    and k-hat.
    """
    shape, size = np.full(len(rows), np.nan), np.full(len(rows), float(max(tail, 1)))
    if tail < FEWEST or not len(rows):
        return shape, size, shape
    top = np.sort(rows, axis=1)[:, -(tail + 1) :]
    # exp(a) - exp(b) over the largest weight, without cancellation; the shape does not see the
    # scale.
    over = np.exp(top[:, 1:] - top[:, -1:]) * -np.expm1(top[:, :1] - top[:, 1:])
    ties = (over <= 0.0).sum(axis=1)
    whole = ties == 0
    if whole.any():
        shape[whole] = _zhang_stephens(over[whole])
    for i in np.flatnonzero(~whole):  # weights equal to the one below the tail are not above it
        size[i] = max(tail - int(ties[i]), 1)
        if size[i] >= FEWEST and over[i, -1] > over[i, ties[i]]:
            shape[i] = _zhang_stephens(over[i : i + 1, ties[i] :])[0]
    # rounding is all that tells them apart
    alike = over[:, -1] - over[:, min(tail - 1, tail // 4)] <= 1e-12
    shape[alike] = np.nan
    khat: Floats = (size * shape + PRIOR_WEIGHTS * PRIOR_SHAPE) / (size + PRIOR_WEIGHTS)
    return shape, size, khat


def _zhang_stephens(x: Floats) -> Floats:
    """Posterior mean of the shape for rows of positive exceedances in rising order (m, M).

    With b_j = 1/x_M + (1 - sqrt(G/(j - 1/2))) / (3 q), q the lower quartile, the profile likelihood
    of b has k(b) = mean log(1 - b x) and the weight exp(M (log(-b/k) - k - 1)); k-hat is k at the
    mean of b.
    """
    rows, size = x.shape
    nodes = GRID + int(math.sqrt(size))
    quartile = x[:, int(size / 4 + 0.5) - 1]
    step = (1.0 - np.sqrt(nodes / (np.arange(1, nodes + 1) - 0.5))) / PRIOR_SCALE
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        b = 1.0 / x[:, -1:] + step / quartile[:, None]  # (m, nodes)
        shape = np.empty((rows, nodes))
        for j in range(nodes):  # one node at a time: the temporary stays in the cache
            shape[:, j] = np.log1p(-b[:, j : j + 1] * x).mean(axis=1)
        fit = size * (np.log(-b / shape) - shape - 1.0)
    fit = np.where(np.isfinite(fit), fit, -np.inf)
    weight = np.exp(fit - fit.max(axis=1, keepdims=True))
    weight = np.where(np.isfinite(b), weight, 0.0)
    mean = (weight * np.where(np.isfinite(b), b, 0.0)).sum(axis=1) / weight.sum(axis=1)
    result: Floats = np.log1p(-mean[:, None] * x).mean(axis=1)
    return result


def _median(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else math.nan


# ---- softmax statistics, and the upper tail of the scores, from binned masses


def score_statistics(state: Deposit) -> dict[str, Floats]:
    """Of each query, over the keys that were deposited: ``effective`` tokens 1/sum p^2 and ``sd``,
    the deviation of the scores, (m,); ``survival`` (m, 8), the share of the scores above z =
    SURVIVAL_AT deviations from their mean.

    sum_j exp(a s_j) = sum_l mass_l exp(a centre_l) / gain(a), with a relative error of about 2 (a
    spacing / 2 pi)^points: 3e-7 (a = 1) and 5e-6 (a = 2) at 4 points and 1/8. Within a cell the
    mass is spread evenly: with the B-spline that adds (points + 1) spacing^2 / 12 to the variance,
    and z is measured in the deviation that includes it. No survival (NaN) for queries whose
    deviation is below RESOLVED cells: softmax over them is nearly uniform.
    """
    points, spacing = state.grid.points, state.grid.spacing
    cells = state.cells[-2].double().clamp_min(0.0).cpu().numpy()  # splines may round below 0
    number = state.end.cpu().numpy()[:, None] + np.arange(-cells.shape[1], 0)
    centre = (number + points / 2) * spacing
    share = cells / cells.sum(axis=1, keepdims=True)
    mean = (share * centre).sum(axis=1, keepdims=True)
    wide = (share * np.square(centre - mean)).sum(axis=1, keepdims=True)
    variance = np.maximum(wide - points * spacing**2 / 12.0, 0.0)
    first, second = (
        scipy.special.logsumexp(a * centre, axis=1, b=cells)
        - math.log(exponential_gain(points, a * spacing))
        for a in (1.0, 2.0)
    )
    wide = np.sqrt(variance + (points + 1) * spacing**2 / 12.0)
    sums = np.concatenate([np.zeros((len(cells), 1)), np.cumsum(share, axis=1)], axis=1)
    place = (mean + wide * SURVIVAL_AT - centre[:, :1]) / spacing + 0.5
    place = np.clip(place, 0.0, cells.shape[1])
    left = np.minimum(place.astype(np.int64), cells.shape[1] - 1)
    low, high = np.take_along_axis(sums, left, axis=1), np.take_along_axis(sums, left + 1, axis=1)
    above = np.maximum(1.0 - (low + (place - left) * (high - low)), 0.0)
    sd = np.sqrt(variance[:, 0])
    above[sd < RESOLVED * spacing] = np.nan
    return {"effective": np.exp(2.0 * first - second), "sd": sd, "survival": above}


def tail_verdict(above: Floats, keys: float) -> str:
    """Whether scores with this survival at SURVIVAL_AT are sub-Gaussian, heavier or lighter.

    They are compared at the last z beyond which a Gaussian would leave EXPECTED of the ``keys``.
    Unknown where there is none, or no survival.
    """
    enough = np.flatnonzero(keys * GAUSSIAN_SURVIVAL >= EXPECTED)
    if enough.size == 0 or np.isnan(above).any():
        return "unknown"
    ratio = above[enough[-1]] / GAUSSIAN_SURVIVAL[enough[-1]]
    return "heavier" if ratio > HEAVIER else "lighter" if ratio < LIGHTER else "sub-Gaussian"


# ---- The critical scale of a row of scores.

SCORES = Grid(1 / 8, 4, 1e-6)  # of keys without values


def gap_counts(scores: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gaps t of each row's scores (m, K) from its largest, rising, and N(t): how many keys lie
    within t of the largest. ``keys`` (m, K): how many stand at each score, 1 unless given; several
    stand for keys around it, of which the middle one is counted.
    """
    falling, order = scores.double().sort(dim=1, descending=True)
    mass = torch.ones_like(falling) if keys is None else keys.gather(1, order)
    return falling[:, :1] - falling, mass.cumsum(1) - (mass - mass.clamp_max(1)) / 2


def gaps_from_masses(masses: Deposit, top: Tensor) -> tuple[Tensor, Tensor]:
    """The same from deposits of keys without values, none of them above the largest scores ``top``
    (m, K), which are exact.
    """
    grid, length = masses.grid, masses.cells.shape[2]
    mass = deposit.without(masses, top, top.new_zeros(top.shape[1], 0)).cells[-2].clamp_min(0)
    # Deposits are wider than the scores by the variance points spacing^2 / 12 of a B-spline: drawn
    # nearer to their mean they have the scores' own mean and variance.
    centre = grid.centres(length, mass.device)
    total = mass.sum(1, keepdim=True).clamp_min(TINY)
    apart = centre - (mass @ centre)[:, None] / total
    wide = (mass * apart.square()).sum(1, keepdim=True) / total
    own = (wide - grid.points * grid.spacing**2 / 12).clamp_min(0)
    places = centre - apart + apart * torch.sqrt(own / wide.clamp_min(TINY))
    highest = top.double() - (masses.end * grid.spacing).double()[:, None]  # from the grid's end
    keys = torch.cat([mass, (top > -torch.inf).double()], dim=1)
    return gap_counts(torch.cat([places.minimum(highest.amin(1, keepdim=True)), highest], 1), keys)


def critical_scale(gaps: Tensor, counts: Tensor) -> Tensor:
    """Lambda = sup over t > 0 of log N(t) / t of each row: what its scores may be multiplied with
    before softmax freezes on the largest; infinite where the largest is not alone.

    Where scores are multiplied with b, the largest weight p has, t the gap of Lambda,

        b > Lambda:   p >= 1 - Lambda / b,         b < Lambda:   p <= N(t)^-(1 - b / Lambda).

    Proof: 1/p = sum_j exp(-b t_j) = b int exp(-b t) N(t) dt is at most b / (b - Lambda), as N(t) <=
    exp(Lambda t), and at least N(t) exp(-b t). Source: Hayase, Karakida, arXiv 2605.12697, by its
    abstract and by others' accounts of its definition; the bounds at finite b are derived here.
    """
    near = (counts > 1 + 1e-9) & (gaps < torch.inf)
    rates = torch.where(near, counts.clamp_min(1).log() / gaps, 0.0)
    return rates.amax(1)
