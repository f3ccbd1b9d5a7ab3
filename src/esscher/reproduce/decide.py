"""Decision rules in small pieces: an interval against a bound, shares, rank correlations, rates
fitted to stored errors.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from esscher.convergence.curve import ErrorCurve
from esscher.convergence.rate.fit import fit_rate
from esscher.convergence.rate.result import RateFit
from esscher.intervals import Interval, share_interval
from esscher.intervals import mean_interval as student_interval
from esscher.reproduce.claim import Verdict

__all__ = [
    *(
        "LEVEL",
        "above",
        "all_of",
        "below",
        "fitted",
        "inside",
        "mean_interval",
        "rank_correlation",
        "share_of",
    ),
    "widened",
]

LEVEL = 0.999
"""Of the intervals that decide: a verdict that another seed would overturn is worth nothing."""

Floats = npt.NDArray[np.float64]


def above(low: float, high: float, bound: float) -> Verdict:
    """Supported where the whole interval lies above the bound, refuted where all of it lies
    below.
    """
    return "supported" if low > bound else "refuted" if high < bound else "undecided"


def below(low: float, high: float, bound: float) -> Verdict:
    """The other way round."""
    return above(-high, -low, -bound)


def inside(low: float, high: float, least: float, most: float) -> Verdict:
    """Supported where the interval lies between two bounds, refuted where none of it does."""
    if low >= least and high <= most:
        return "supported"
    return "refuted" if high < least or low > most else "undecided"


def all_of(verdicts: Iterable[Verdict]) -> Verdict:
    """Of a claim with parts: refuted by one of them, supported by all together."""
    found = set(verdicts)
    return (
        "refuted" if "refuted" in found else "supported" if found == {"supported"} else "undecided"
    )


def share_of(hits: int, total: int, level: float = LEVEL) -> Interval:
    """A share with its interval, at the level that decides."""
    return share_interval(hits, total, level)


def mean_interval(values: Iterable[float], level: float = LEVEL) -> Interval:
    """A mean with Student's interval; of one value it has no ends, which decides nothing."""
    mean, low, high = student_interval(list(values), level)
    return (mean, -np.inf, np.inf) if np.isnan(low) else (mean, low, high)


def rank_correlation(x: Iterable[float], y: Iterable[float], level: float = LEVEL) -> Interval:
    """Spearman's, with the interval of Fisher's transform and the variance 1.06 / (n - 3) of
    Fieller, Hartley and Pearson.
    """
    pairs = pd.DataFrame({"x": list(x), "y": list(y)}).dropna()
    rho = (
        float(stats.spearmanr(pairs["x"], pairs["y"]).statistic) if len(pairs) > 4 else float("nan")
    )
    if not np.isfinite(rho):
        return float("nan"), -1.0, 1.0
    middle = np.arctanh(np.clip(rho, -1 + 1e-12, 1 - 1e-12))
    half = stats.norm.ppf((1 + level) / 2) * np.sqrt(1.06 / (len(pairs) - 3))
    return rho, float(np.tanh(middle - half)), float(np.tanh(middle + half))


def widened(value: float, low: float, high: float, level: float = LEVEL) -> Interval:
    """A stored 95 % interval at the level that decides, errors taken as normal."""
    factor = float(stats.norm.ppf((1 + level) / 2) / stats.norm.ppf(0.975))
    return value, value - factor * (value - low), value + factor * (high - value)


def fitted(errors: pd.DataFrame, metric: str, point: int = 0, level: float = LEVEL) -> RateFit:
    """The rate of one error from the stored squared errors of every repeat (table ``errors`` of
    ``esscher converge``).
    """
    own = errors[(errors["metric"] == metric) & (errors["point"] == point)]
    squared = own.pivot(index="repeat", columns="n", values="squared").sort_index(axis=1)
    curve = ErrorCurve.from_repeats(
        squared.columns.to_numpy(dtype=np.int64), squared.to_numpy(dtype=np.float64), metric=metric
    )
    return fit_rate(curve, level=level, raise_on_failure=False)
