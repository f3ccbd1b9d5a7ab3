"""From a curve to token numbers: how many are needed, and from where on the delta method is right."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.interpolate import CubicHermiteSpline, PchipInterpolator

from esscher.convergence.curve import ErrorCurve, Floats
from esscher.inputs import as_positive

__all__ = ["asymptotic_from", "tokens_needed"]

GRID = 4001  # points of log n on which a crossing is first looked for


def tokens_needed(curve: ErrorCurve, epsilon: Any) -> int:
    """Smallest n with relative RMS error <= epsilon, by interpolation of log error in log n.

    With the analytic local slopes of an exact curve the interpolation is a cubic Hermite spline. Answers the first n of the
    curve when the error is small enough there already; raises when the curve never gets there.
    """
    epsilon = as_positive(epsilon, "epsilon")
    if not (math.isfinite(curve.scale) and curve.scale > 0):
        raise ValueError(
            f"curve: expected a limit of positive size to compare with, got scale {curve.scale}; compare curve.rms instead"
        )
    if curve.relative[0] <= epsilon:
        return int(curve.n[0])
    first = _first_crossing(curve, np.log(np.maximum(curve.relative, 1e-300)) - math.log(epsilon), curve.slope)
    if first is None:
        raise ValueError(
            f"epsilon: a relative error of {epsilon:g} is not reached; it is {curve.relative[-1]:.4g} at the largest n = "
            f"{int(curve.n[-1])}; give larger n"
        )
    return first


def asymptotic_from(curve: ErrorCurve, tolerance: float = 0.1) -> int:
    """Smallest n from which on the delta method's rms sqrt(tr C / n) stays within ``tolerance`` of the exact one."""
    tolerance = as_positive(tolerance, "tolerance")
    if curve.delta is None or not math.isfinite(curve.delta):
        raise ValueError("curve: the delta method has no finite constant here, so it is never right")
    apart = np.abs(0.5 * (math.log(curve.delta) - np.log(curve.n)) - np.log(curve.rms)) - math.log1p(tolerance)
    inside = apart <= 0
    if not inside[-1]:
        ratio = math.sqrt(curve.delta / float(curve.n[-1])) / float(curve.rms[-1])
        raise ValueError(
            f"curve: the delta method is still off by a factor {ratio:.4g} at the largest n = {int(curve.n[-1])}; give larger n"
        )
    start = int(np.flatnonzero(~inside)[-1]) if not inside.all() else -1
    if start < 0:
        return int(curve.n[0])
    share = apart[start] / (apart[start] - apart[start + 1])
    log_n = np.log(curve.n[start : start + 2].astype(float))
    return math.ceil(math.exp(float(log_n[0] + share * (log_n[1] - log_n[0]))) - 1e-9)


def _first_crossing(curve: ErrorCurve, height: Floats, slope: Floats | None) -> int | None:
    """The smallest n where the interpolated height falls to 0, or None."""
    log_n = np.log(curve.n.astype(float))
    if curve.n.size == 1:
        return None
    if slope is not None and np.isfinite(slope).all():
        spline = CubicHermiteSpline(log_n, height, slope)
    else:
        spline = PchipInterpolator(log_n, height)
    grid = np.unique(np.concatenate([np.linspace(log_n[0], log_n[-1], GRID), log_n]))
    below = np.flatnonzero(spline(grid) <= 0)
    if below.size == 0:
        return None
    low, high = grid[below[0] - 1], grid[below[0]]
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if spline(middle) > 0 else (low, middle)
    return math.ceil(math.exp(high) - 1e-6)
