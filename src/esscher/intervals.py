"""Confidence intervals of a mean, of a share and of a rank correlation; each stays in the range of
what it is of, and holds the estimate.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats


class Interval(NamedTuple):
    """An estimate with the ends of its interval."""

    value: float
    low: float
    high: float


def t_quantile(freedom: float, level: float = 0.95) -> float:
    """Student's two-sided quantile: the half width of an interval in standard errors."""
    return float(stats.t.ppf((1 + level) / 2, freedom))


def mean_interval(
    values: npt.ArrayLike,
    level: float = 0.95,
    *,
    least: float = -math.inf,
    most: float = math.inf,
) -> Interval:
    """Mean of independent values and the ends of its interval; NaN ends for fewer than three: from
    two, Student's quantile is 12.7 and the interval says nothing.

    m the mean, s its standard error, t Student's quantile for count - 1 degrees of freedom. Without
    bounds: m -+ t s; at least ``least``: the same on the scale log(m - least), where the standard
    error is s / (m - least); between ``least`` and ``most``: Wilson's for the share m of that
    range, with t for the normal quantile and the number of 0/1 trials that would have the standard
    error s (Korn and Graubard's effective sample size).
    """
    known = np.asarray(values, dtype=np.float64)
    mean = min(max(float(known.mean()), least), most)
    if known.size < 3:
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


def rank_correlation(x: npt.ArrayLike, y: npt.ArrayLike, level: float = 0.95) -> Interval:
    """Spearman's correlation of the pairs that have both, with the interval of Fisher's transform
    and the variance 1.06 / (n - 3) of Fieller, Hartley and Pearson; NaN where it says nothing.
    """
    pairs = np.column_stack([x, y]).astype(np.float64)
    first, second = pairs[~np.isnan(pairs).any(axis=1)].T
    if len(first) < 5 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return Interval(math.nan, -1.0, 1.0)
    rho = float(stats.spearmanr(first, second).statistic)
    middle = np.arctanh(np.clip(rho, -1 + 1e-12, 1 - 1e-12))
    half = stats.norm.ppf((1 + level) / 2) * np.sqrt(1.06 / (len(first) - 3))
    return Interval(rho, float(np.tanh(middle - half)), float(np.tanh(middle + half)))
