"""A mean over texts or draws, with its interval."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy import stats

__all__ = ["interval"]


def interval(
    values: npt.NDArray[np.float64], *, binary: bool = False, level: float = 0.95
) -> tuple[float, float, float]:
    """Mean, and the ends of Student's interval, of what is 0 or 1 of Wilson's; of one value
    none.
    """
    mean = float(values.mean())
    if binary:
        count, z2 = len(values), float(stats.norm.ppf((1 + level) / 2)) ** 2
        middle, half = (
            mean + z2 / (2 * count),
            math.sqrt(z2 * (mean * (1 - mean) / count + z2 / (4 * count**2))),
        )
        return mean, (middle - half) / (1 + z2 / count), (middle + half) / (1 + z2 / count)
    if len(values) < 2:
        return mean, math.nan, math.nan
    half = float(
        stats.t.ppf((1 + level) / 2, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    )
    return mean, mean - half, mean + half
