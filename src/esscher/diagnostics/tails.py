"""Pareto k-hat of softmax weights: how heavy the tail is that the few largest weights come from,
with an interval.

Attention on n tokens is self-normalised importance sampling of its own limit, with the ratios e =
exp(score). If the ratios' upper tail is generalised Pareto with shape k, moments of order below 1/k
are finite: k < 1/2 gives the rate n^(-1/2), and above it the rate falls. The M largest of S ratios,
M = floor(min(S/5, 3 sqrt(S))), less the next one below, are fitted by

    density (1 + k x / sigma)^(-1/k - 1) / sigma,      k-hat = (M k + 10/2) / (M + 10),

k the posterior mean of Zhang and Stephens (Technometrics 51, 2009, 316-325), shrunk by a prior
worth ten weights at 1/2: Pareto smoothed importance sampling (Vehtari, Simpson, Gelman, Yao, Gabry,
JMLR 25(72), 2024), whose thresholds are used: good up to min(1 - 1/log10 S, 0.7), bad up to 1, very
bad above. The interval is k -+ z (1 + k)/sqrt(M), the asymptotic deviation of the likelihood
estimate for k > -1/2 (Smith, Biometrika 72, 1985); it holds for a tail that is Pareto, and does not
know how far the tail is from one.

The M + 1 largest scores of each query are a streaming state: init, update, merge, finish.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.special
import torch
from torch import Tensor
from torch.nn.functional import pad

from esscher.inputs import as_count, as_tensor

__all__ = [
    "TailFit",
    "TopScores",
    "finish",
    "gaussian_khat",
    "init",
    "khat_threshold",
    "merge",
    "pareto_khat",
    "stack",
    "tail_length",
    "update",
]

Floats = npt.NDArray[np.float64]

GRID = 30  # posterior nodes, and sqrt(M) more [Zhang, Stephens]
PRIOR_SCALE = 3.0  # of the prior's scale, in quartiles of the tail [the same]
PRIOR_WEIGHTS, PRIOR_SHAPE = 10.0, 0.5  # the prior of k-hat, in weights [Vehtari et al.]
FEWEST = 5  # exceedances below which no shape is given
BAD = 1.0  # the mean of the ratios is infinite from here on
USUAL = 0.7


@dataclass(frozen=True)
class TopScores:
    """State: the ``keep`` largest scores of each query, in falling order, and how many keys it has
    seen.
    """

    keep: int
    count: Tensor  # (m,) int64
    # (m, at most keep), in the dtype of the scores; a query that has seen fewer keys ends in -inf
    scores: Tensor


@dataclass(frozen=True)
class TailFit:
    """k-hat of every query's weights with its interval; NaN where the largest weights are all alike
    or too few.
    """

    khat: Floats  # (m,)
    low: Floats  # (m,)
    high: Floats  # (m,)
    threshold: float  # good up to here
    tail: int  # weights in the fit
    level: float  # of the interval
    label: str  # of the median query: good, bad, very bad or unknown
    reason: str

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


def init(
    queries: int, keep: int, *, dtype: torch.dtype = torch.float64, device: Any = None
) -> TopScores:
    """The state before any key. For S keys in all, ``keep`` = tail_length(S) + 1 is what the fit
    asks for.
    """
    count = torch.zeros(queries, dtype=torch.int64, device=device)
    return TopScores(
        as_count(keep, "keep"), count, torch.empty(queries, 0, dtype=dtype, device=device)
    )


def update(state: TopScores, scores: Tensor) -> TopScores:
    """The state after one more block of scores (m, B); -inf: a key that a query does not see."""
    if scores.ndim != 2 or scores.shape[0] != state.scores.shape[0]:
        raise ValueError(
            f"scores: expected {state.scores.shape[0]} rows, got shape {tuple(scores.shape)}"
        )
    block = scores.topk(min(state.keep, scores.shape[1]), dim=1).values.to(state.scores.dtype)
    return merge(state, TopScores(state.keep, (scores > -math.inf).sum(1).to(state.count), block))


def merge(a: TopScores, b: TopScores) -> TopScores:
    """The state over the union of two disjoint sets of keys, seen by the same queries."""
    if a.keep != b.keep or a.scores.shape[0] != b.scores.shape[0]:
        raise ValueError(
            f"merge: expected states of the same queries and length, got {a.scores.shape[0]}"
            f" queries keeping {a.keep} and {b.scores.shape[0]} keeping {b.keep}"
        )
    both = torch.cat([a.scores, b.scores], dim=1)
    top = (
        both.topk(min(a.keep, both.shape[1]), dim=1).values
        if a.scores.shape[1] and b.scores.shape[1]
        else both
    )
    return replace(a, count=a.count + b.count, scores=top)


def stack(states: Sequence[TopScores]) -> TopScores:
    """States of different queries, each over its own keys, as one."""
    longest = max(state.scores.shape[1] for state in states)
    rows = [
        pad(state.scores, (0, longest - state.scores.shape[1]), value=-math.inf) for state in states
    ]
    return TopScores(
        max(state.keep for state in states),
        torch.cat([state.count for state in states]),
        torch.cat(rows),
    )


def finish(state: TopScores, level: float = 0.95) -> TailFit:
    """k-hat of every query over all keys it has seen: the tail and its length are the query's own.

    Threshold, label and reason are for the mean number of keys, to the nearest whole number.
    """
    counts = state.count.cpu().numpy()
    if not counts.size or counts.min() == 0:
        raise ValueError("finish: a query of the state has seen no key; update it first")
    khat, low, high = np.empty((3, counts.size))
    totals, place = np.unique(counts, return_inverse=True)
    lengths = np.array([tail_length(total) for total in totals.tolist()])[place]
    # queries whose tails are as long are fitted together
    for length in np.unique(lengths).tolist():
        own = lengths == length
        rows = state.scores[torch.from_numpy(own).to(state.scores.device)]
        fit = pareto_khat(rows[:, torch.isfinite(rows).all(0)], int(counts[own].min()), level=level)
        khat[own], low[own], high[own] = fit.khat, fit.low, fit.high
    mean = round(float(counts.mean()))
    tail, threshold = min(tail_length(mean), state.scores.shape[1] - 1), khat_threshold(mean)
    label, reason = _describe(khat, low, high, threshold, tail, mean, level)
    return TailFit(khat, low, high, threshold, tail, level, label, reason)


def pareto_khat(log_weights: Any, total: Any, *, level: float = 0.95) -> TailFit:
    """k-hat of each row's ``total`` weights from the logarithms of its largest, (m, K) or (K,), in
    any order.

    K should be at least tail_length(total) + 1; a shorter row fits the K - 1 it has. Any constant
    may be added to a row.
    """
    tensor = as_tensor(log_weights, "log_weights")
    if tensor.ndim not in (1, 2):
        raise ValueError(
            f"log_weights: expected a row or rows of logarithms, got shape {tuple(tensor.shape)}"
        )
    if not 0.0 < level < 1.0:
        raise ValueError(f"level: expected a number between 0 and 1, got {level}")
    rows = np.atleast_2d(tensor.detach().double().cpu().numpy())
    total = as_count(total, "total")
    if rows.shape[1] > total:
        raise ValueError(f"total: expected at least the {rows.shape[1]} weights given, got {total}")
    tail = min(tail_length(total), rows.shape[1] - 1)
    threshold = khat_threshold(total)
    shape, size = _fit_rows(rows, tail)
    half = (
        -float(scipy.special.ndtri((1.0 - level) / 2))
        * np.maximum(1.0 + shape, 0.5)
        / np.sqrt(size)
    )
    khat = (size * shape + PRIOR_WEIGHTS * PRIOR_SHAPE) / (size + PRIOR_WEIGHTS)
    label, reason = _describe(khat, shape - half, shape + half, threshold, tail, total, level)
    return TailFit(khat, shape - half, shape + half, threshold, tail, level, label, reason)


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
    shape, size = _fit_rows(deviation[:, None] * z, len(rank) - 1)
    khat: Floats = (size * shape + PRIOR_WEIGHTS * PRIOR_SHAPE) / (size + PRIOR_WEIGHTS)
    return khat


def _fit_rows(rows: Floats, tail: int) -> tuple[Floats, Floats]:
    """Shape k of each row's ``tail`` largest weights above the next, and how many of them there
    were.
    """
    shape, size = np.full(len(rows), np.nan), np.full(len(rows), float(max(tail, 1)))
    if tail < FEWEST or not len(rows):
        return shape, size
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
    return shape, size


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


def _describe(
    khat: Floats, low: Floats, high: Floats, threshold: float, tail: int, total: int, level: float
) -> tuple[str, str]:
    known = khat[~np.isnan(khat)]
    if not known.size:
        return (
            "unknown",
            f"No k-hat: the {tail} largest of {total} weights are too few or all alike.",
        )
    middle = float(np.median(known))
    label = "good" if middle <= threshold else "bad" if middle <= BAD else "very bad"
    meaning = {
        "good": "averages over this many tokens are reliable",
        "bad": (
            "averages over this many tokens converge slowly and their spread cannot be read from"
            " the sample"
        ),
        "very bad": (
            "a few weights decide, and even the mean of the weights is not settled at this many"
            " tokens"
        ),
    }[label]
    above = float((known > threshold).mean())
    reason = (
        f"Median k-hat {middle:.2f} ({level:.0%} interval {_median(low):.2f} to"
        f" {_median(high):.2f}) against the threshold {threshold:.2f} for {total} tokens,"
        f" {above:.0%} of {known.size} queries above it: {meaning}."
    )
    return label, reason


def _median(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else math.nan
