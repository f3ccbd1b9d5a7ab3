"""From a curve to token numbers: how many are needed, and from where on the delta method is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.interpolate import CubicHermiteSpline, PchipInterpolator

from esscher.convergence.curve import ErrorCurve, Floats
from esscher.inputs import as_positive

__all__ = ["asymptotic_from", "log_rms", "tokens_needed"]

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
    first = _first_crossing(curve, math.log(epsilon * curve.scale))
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


def log_rms(curve: ErrorCurve) -> Callable[[Any], Floats]:
    """log rms as a function of log n between the curve's ends: cubic Hermite with analytic slopes, else monotone cubic.

    A curve that ends in exactly 0 keeps each of N keys with probability n/N. Its error is sqrt(1/n - 1/N) times a factor
    that varies slowly, and that factor is interpolated, a power of n from the last n below N on.
    """
    if curve.rms[-1] == 0 and curve.n.size > 1:
        n, rms, total = curve.n[:-1].astype(float), curve.rms[:-1], float(curve.n[-1])
        factor = _spline(np.log(n), np.log(rms) - 0.5 * np.log(1 / n - 1 / total), None)
        last = math.log(n[-1])
        rise = 0.0 if n.size == 1 else float((factor(last) - factor(last - 0.01)) / 0.01)

        def kept(log_n: Any) -> Floats:
            with np.errstate(divide="ignore", invalid="ignore"):  # log 0 at n = N
                gap = np.maximum(np.exp(-log_n) - 1 / total, 0.0)
                gap = np.where(log_n >= math.log(total) * (1 - 1e-15), 0.0, gap)
                beyond = rise * np.maximum(log_n - last, 0.0)
                return np.asarray(factor(np.minimum(log_n, last)) + beyond + 0.5 * np.log(gap))

        return kept
    return _spline(np.log(curve.n.astype(float)), np.log(np.maximum(curve.rms, 1e-300)), curve.slope)


def _spline(log_n: Floats, height: Floats, slope: Floats | None) -> Callable[[Any], Floats]:
    if log_n.size == 1:
        return lambda x: np.full_like(np.asarray(x, dtype=float), height[0])
    if slope is not None and np.isfinite(slope).all():
        return CubicHermiteSpline(log_n, height, slope)  # type: ignore[no-any-return]
    return PchipInterpolator(log_n, height)  # type: ignore[no-any-return]


def _first_crossing(curve: ErrorCurve, level: float) -> int | None:
    """The smallest n where the interpolated log rms falls to the level, or None."""
    log_n = np.log(curve.n.astype(float))
    if curve.n.size == 1:
        return None
    spline = log_rms(curve)
    grid = np.unique(np.concatenate([np.linspace(log_n[0], log_n[-1], GRID), log_n]))
    below = np.flatnonzero(spline(grid) <= level)
    if below.size == 0:
        return None
    low, high = grid[below[0] - 1], grid[below[0]]
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if spline(middle) > level else (low, middle)
    return math.ceil(math.exp(high) - 1e-6)
