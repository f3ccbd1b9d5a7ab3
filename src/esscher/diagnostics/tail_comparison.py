"""Which law the largest values follow, Pareto or sub-Gaussian: both fitted by likelihood to the
exceedances, then compared.

Values z > u, exceedances e = z - u. The two laws of what lies beyond u:

    Pareto        P(e > x) = (1 + xi x / b)^(-1/xi), xi > 0;  exp(-x / b), the lightest of them, at
    xi = 0 sub-Gaussian  P(z > x) = Q(x / sigma) / Q(u / sigma), Q the survival of the standard
    normal law

The first is the generalised Pareto law, which exceedances of every law with a power tail of
exponent 1/xi come near to (Balkema, de Haan 1974; Pickands 1975). The second is the tail of a
Gaussian about 0, the law that sub-Gaussian ones are measured by; sigma solves E[z^2 | z > u] =
sigma^2 + u sigma phi(u/sigma)/Q(u/sigma) = mean z^2, and is 1 for Gaussian values in standard
deviations. The Pareto side may not take xi < 0: those laws end somewhere, and are sub-Gaussian.

Let l_i be the log-likelihood of value i under the first less that under the second. The sign of
their mean is believed where the mean is beyond its standard error (Vuong, Econometrica 57, 1989,
307-333; Clauset, Shalizi, Newman, SIAM Review 51, 2009, 661-703). The shape xi that is told is that
of largest likelihood over xi > -1/2, where it is regular (Smith, Biometrika 72, 1985), negative if
need be; (1 + xi)^2 s_xi - b (1 + xi) s_b is the influence of a value on it, s the scores.

Values that come from one token, or from tokens alike in every digit, are no independent witnesses:
both standard errors are of sums over groups of values, sqrt(G/(G - 1) sum_g (sum_{i in g} x_i)^2) /
M for G groups of M values in all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy.optimize
import scipy.special

__all__ = ["TAILS", "Floats", "TailComparison", "compare"]

Floats = npt.NDArray[np.float64]

FEWEST = 30  # exceedances below which nothing is fitted
GROUPS = 10  # and groups of them
LEVEL = 0.95  # of intervals, and of the verdict
SMALLEST_SHAPE = -0.5
ROOT = math.sqrt(2.0 / math.pi)
# thresholds in deviations from which the hazard's expansion has all digits that its formula has
FAR = 1e3
FLAT = 1e-6  # xi and t so near 0 that the law is exponential

TAILS = ("sub-Gaussian", "between", "Pareto", "undecided", "unknown")


@dataclass(frozen=True)
class TailComparison:
    """Both fits and which is better; NaN where there was too little to fit.

    ``ratio`` is the log-likelihood of the Pareto law less that of the sub-Gaussian one, per
    exceedance.
    """

    threshold: float  # u
    exceedances: int
    groups: int
    shape: float  # xi
    shape_interval: tuple[float, float]
    sigma: float
    ratio: float
    ratio_interval: tuple[float, float]
    p_value: float  # chance of a mean ratio as far from 0 where both laws are as good; two-sided
    verdict: str  # one of TAILS
    reason: str


def compare(values: Floats, threshold: float, groups: npt.NDArray[np.int64]) -> TailComparison:
    """Fit both laws to the values above a threshold; ``groups``: values of one number are one
    witness.
    """
    over = values > threshold
    z, (_, group) = values[over], np.unique(groups[over], return_inverse=True)
    count, witnesses = len(z), int(group.max(initial=-1)) + 1
    excess = z - threshold
    if (
        count < FEWEST
        or witnesses < GROUPS
        or not excess.max() > 1e-12 * abs(threshold)
        or not threshold > 0.0
    ):
        return _unknown(threshold, count, witnesses)
    shape, scale = _fit_pareto(excess)
    shape_se = _standard_error(_influence(excess, shape, scale), group)
    sigma, light = _fit_gaussian(z, threshold)
    heavy = _log_density(excess, *((shape, scale) if shape > 0.0 else (0.0, float(excess.mean()))))
    ratio = float((heavy - light).mean())
    ratio_se = _standard_error(heavy - light - ratio, group)
    reach = -float(scipy.special.ndtri((1.0 - LEVEL) / 2))
    shape_interval = shape - reach * shape_se, shape + reach * shape_se
    ratio_interval = ratio - reach * ratio_se, ratio + reach * ratio_se
    p_value = math.erfc(abs(ratio) / (ratio_se * math.sqrt(2.0))) if ratio_se > 0.0 else 1.0
    verdict = _verdict(shape_interval, ratio_interval)
    reason = (
        f"{verdict}: {MEANINGS[verdict]} ({count} values of {witnesses} tokens beyond"
        f" {threshold:.2f} standard deviations, Pareto shape {shape:.2f}, {shape_interval[0]:.2f}"
        f" to {shape_interval[1]:.2f}; sub-Gaussian scale {sigma:.2f}; log-likelihood ratio"
        f" {ratio:+.2g} a value, {ratio_interval[0]:+.2g} to {ratio_interval[1]:+.2g})"
    )
    return TailComparison(
        threshold,
        count,
        witnesses,
        shape,
        shape_interval,
        sigma,
        ratio,
        ratio_interval,
        p_value,
        verdict,
        reason,
    )


MEANINGS = {
    "sub-Gaussian": "the sub-Gaussian law fits better than any Pareto law",
    "Pareto": "a Pareto law fits better, and its shape is above 0",
    "between": (
        "heavier than the sub-Gaussian law, yet no power is seen: the Pareto shape may be 0, an"
        " exponential tail"
    ),
    "undecided": "neither law fits better beyond the error of the comparison",
}


def _verdict(shape: tuple[float, float], ratio: tuple[float, float]) -> str:
    if ratio[1] < 0.0:
        return "sub-Gaussian"
    if ratio[0] > 0.0:
        return "Pareto" if shape[0] > 0.0 else "between"
    return "undecided"


def _unknown(threshold: float, count: int, witnesses: int) -> TailComparison:
    """Nothing fitted: too few values, or all alike."""
    nothing, nowhere = math.nan, (math.nan, math.nan)
    reason = (
        f"unknown: {count} values of {witnesses} tokens are too few or too much alike to fit a tail"
        f" (at least {FEWEST} of {GROUPS})"
    )
    return TailComparison(
        threshold,
        count,
        witnesses,
        nothing,
        nowhere,
        nothing,
        nothing,
        nowhere,
        nothing,
        "unknown",
        reason,
    )


def _fit_pareto(excess: Floats) -> tuple[float, float]:
    """Shape and scale of largest likelihood. With t = xi / b the best xi is mean log(1 + t e), and
    the likelihood of t

        l(t) = - log(xi / t) - xi - 1

    has one variable (Grimshaw, Technometrics 35, 1993): its best place on a grid, then the root of
    its slope beside that.
    """
    x = excess / excess.mean()

    def shape_of(t: float) -> float:
        return float(np.log1p(t * x).mean())

    def loss(t: float) -> float:
        shape = shape_of(t)
        return 1.0 if abs(t) < FLAT else math.log(shape / t) + shape + 1.0

    def slope(t: float) -> float:
        bend = float((x / (1.0 + t * x)).mean())
        return (
            1.0 - 0.5 * float(np.square(x).mean())
            if abs(t) < FLAT
            else bend / shape_of(t) - 1.0 / t + bend
        )

    first = -(1.0 - 1e-12) / float(x.max())
    if shape_of(first) < SMALLEST_SHAPE:
        first = scipy.optimize.brentq(lambda t: shape_of(t) - SMALLEST_SHAPE, first, 0.0)
    grid = np.concatenate(
        [np.geomspace(first, 1e-2 * first, 16), [0.0], np.geomspace(1e-2, 1e6, 48)]
    )
    best = int(np.argmin([loss(t) for t in grid]))
    ends = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)])
    t = float(grid[best])
    if slope(ends[0]) < 0.0 < slope(ends[1]):
        t = float(scipy.optimize.brentq(slope, *ends, xtol=1e-14))
    shape = shape_of(t)
    mean = float(excess.mean())
    return (0.0, mean) if abs(t) < FLAT else (shape, mean * shape / t)


def _fit_gaussian(z: Floats, u: float) -> tuple[float, Floats]:
    """Scale sigma, and the log-density of each value.

    With x = u / sigma and the hazard h = phi/Q, sigma solves mean (z^2 - u^2)/2 = sigma^2 (1 + x
    (h(x) - x))/2, and the last factor lies between 1/2 and 1. Q(x) = exp(-x^2/2) erfcx(x / sqrt 2)
    / 2: no exponential is left to underflow.
    """
    half = 0.5 * (z - u) * (z + u)
    mean = float(half.mean())

    def miss(variance: float) -> float:
        x = u / math.sqrt(variance)
        factor = (
            1.0 - 1.0 / x**2
            if x > FAR
            else 0.5 + 0.5 * x * (ROOT / scipy.special.erfcx(x / math.sqrt(2.0)) - x)
        )
        return variance / mean * factor - 1.0

    variance = float(scipy.optimize.brentq(miss, 0.99 * mean, 2.01 * mean, xtol=1e-15 * mean))
    sigma = math.sqrt(variance)
    density: Floats = -half / variance - math.log(
        sigma * scipy.special.erfcx(u / (sigma * math.sqrt(2.0))) / ROOT
    )
    return sigma, density


def _log_density(excess: Floats, shape: float, scale: float) -> Floats:
    x = excess / scale
    if shape == 0.0:
        return -x - math.log(scale)
    found: Floats = -(1.0 + 1.0 / shape) * np.log1p(shape * x) - math.log(scale)
    return found


def _influence(excess: Floats, shape: float, scale: float) -> Floats:
    """Of each value on the shape: (1 + xi)^2 s_xi - b (1 + xi) s_b."""
    x = excess / scale
    part = x / (1.0 + shape * x)
    bend = (
        0.5 * x * x - x
        if shape == 0.0
        else np.log1p(shape * x) / shape**2 - (1.0 + 1.0 / shape) * part
    )
    found: Floats = (1.0 + shape) ** 2 * bend - (1.0 + shape) * ((1.0 + shape) * part - 1.0)
    return found


def _standard_error(parts: Floats, group: npt.NDArray[np.int64]) -> float:
    """Of the mean of parts whose sum is near 0, from sums over groups."""
    sums = np.bincount(group, weights=parts)
    return math.sqrt(len(sums) / (len(sums) - 1) * float(np.square(sums).sum())) / len(parts)
