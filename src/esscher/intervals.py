"""Confidence intervals of a mean, of a share and of a rank correlation.

An interval stays in the range of what it is of, and holds the estimate.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

Floats = npt.NDArray[np.float64]

RESAMPLES = 2000
LEVEL = 0.95


class Interval(NamedTuple):
    """An estimate with the ends of its interval."""

    value: float
    low: float
    high: float


def t_quantile(freedom: float, level: float = 0.95) -> float:
    """Student's two-sided quantile: the half width of an interval in standard errors that were
    estimated with so many degrees of freedom.
    """
    return float(stats.t.ppf((1 + level) / 2, freedom))


def mean_interval(
    values: npt.ArrayLike,
    level: float = 0.95,
    *,
    least: float = -math.inf,
    most: float = math.inf,
) -> Interval:
    """Mean of independent values and the ends of its interval; NaN ends for a single value.

    m the mean, s its standard error, t Student's quantile for count - 1 degrees of freedom:

    - values without bounds: m -+ t s;
    - values of at least ``least``: Student's on the scale log(m - least), whose standard error is
      s / (m - least) (delta method);
    - values between ``least`` and ``most``: Wilson's for the share m of that range, with t for the
      normal quantile and the number of 0/1 trials that would have the standard error s (Korn and
      Graubard's effective sample size; the number of values where all are alike).
    """
    known = np.asarray(values, dtype=np.float64)
    mean = min(max(float(known.mean()), least), most)
    if known.size < 2:
        return Interval(mean, math.nan, math.nan)
    stderr = float(known.std(ddof=1)) / math.sqrt(known.size)
    t = t_quantile(known.size - 1, level)
    if math.isfinite(least) and math.isfinite(most):
        share, width = (mean - least) / (most - least), most - least
        spread = share * (1 - share) * width**2
        trials = spread / stderr**2 if min(spread, stderr**2) > 0 else float(known.size)
        low, high = _wilson(share, trials, t)
        return Interval(mean, min(least + width * low, mean), max(least + width * high, mean))
    if math.isfinite(least):
        above = mean - least
        factor = math.exp(min(t * stderr / above, 700.0)) if above > 0 else 1.0
        return Interval(mean, least + above / factor, least + above * factor)
    if math.isfinite(most):
        raise ValueError(f"most: expected least beside it, got most = {most:g} alone")
    return Interval(mean, mean - t * stderr, mean + t * stderr)


def share_interval(hits: float, total: int, level: float = 0.95) -> Interval:
    """hits / total with Wilson's interval; NaN in [0, 1] where there was no trial."""
    if total == 0:
        return Interval(math.nan, 0.0, 1.0)
    share = hits / total
    low, high = _wilson(share, total, float(stats.norm.ppf((1 + level) / 2)))
    return Interval(share, min(low, share), max(high, share))


def _wilson(share: float, trials: float, z: float) -> tuple[float, float]:
    """Both p with (share - p)^2 = z^2 p (1 - p) / trials."""
    far = z * z / trials
    middle = share + far / 2
    half = math.sqrt(far * (share * (1 - share) + far / 4))
    return max(0.0, (middle - half) / (1 + far)), min(1.0, (middle + half) / (1 + far))


def rank_correlation(x: Floats, y: Floats, seed: int) -> Interval:
    """Spearman's rho with percentiles of the bootstrap over its points; NaN where x or y does not
    vary.

    A resample in which one of them does not vary has no rho, and is left out.
    """
    if len(np.unique(x)) < 2 or len(np.unique(y)) < 2:
        return Interval(math.nan, math.nan, math.nan)
    rho = float(stats.spearmanr(x, y).statistic)
    rows = np.random.default_rng(seed).integers(0, len(x), size=(RESAMPLES, len(x)))
    a, b = (stats.rankdata(values[rows], axis=1) for values in (x, y))
    a, b = (ranks - ranks.mean(axis=1, keepdims=True) for ranks in (a, b))
    with np.errstate(invalid="ignore"):
        drawn = (a * b).sum(axis=1) / np.sqrt((a**2).sum(axis=1) * (b**2).sum(axis=1))
    low, high = np.nanquantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(rho, float(low), float(high))
