"""From a curve to token numbers: how many are needed, and from where on the delta method is
right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.interpolate import CubicHermiteSpline, PchipInterpolator

from esscher.convergence.curve import ErrorCurve, Floats
from esscher.inputs import as_kind, as_positive

__all__ = ["asymptotic_from", "log_rms", "tokens_needed"]

GRID = 4001  # points of log n on which a crossing is first looked for
PIECES, ROUNDS = 256, 5  # then in pieces of an interval, again and again: to the last digit


def tokens_needed(curve: ErrorCurve, epsilon: Any) -> int:
    """Smallest n with relative RMS error <= epsilon, by interpolation of log error in log n.

    With the analytic local slopes of an exact curve the interpolation is a cubic Hermite spline.
    Answers the first n of the curve when the error is small enough there already; raises when the
    curve never gets there.
    """
    epsilon = as_positive(epsilon, "epsilon")
    curve = as_kind(curve, ErrorCurve, "curve").ascending()
    if curve.rms[0] == 0:
        return int(curve.n[0])
    if not (math.isfinite(curve.scale) and curve.scale > 0):
        raise ValueError(
            f"curve: expected a limit of positive size to compare with, got scale {curve.scale};"
            " compare curve.rms instead"
        )
    if curve.relative[0] <= epsilon:
        return int(curve.n[0])
    first = _first_crossing(curve, math.log(epsilon * curve.scale))
    if first is None:
        raise ValueError(
            f"epsilon: a relative error of {epsilon:g} is not reached; it is"
            f" {curve.relative[-1]:.4g} at the largest n = {int(curve.n[-1])}; give larger n"
        )
    return first


def asymptotic_from(curve: ErrorCurve, tolerance: float = 0.1) -> int:
    """Smallest n from which on the delta method's rms sqrt(tr C / n) stays within ``tolerance`` of
    the exact one.

    Where both are 0 they agree. Between two n of the curve the logarithm of their ratio is
    interpolated.
    """
    tolerance = as_positive(tolerance, "tolerance")
    curve = as_kind(curve, ErrorCurve, "curve").ascending()
    if curve.delta is None or not math.isfinite(curve.delta):
        raise ValueError(
            "curve: the delta method has no finite constant here, so it is never right"
        )
    asymptotic = np.sqrt(max(curve.delta, 0.0) / curve.n)
    # an error of 0 is infinitely far from any other
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(asymptotic == curve.rms, 1.0, asymptotic / curve.rms)
        apart = np.abs(np.log(ratio)) - math.log1p(tolerance)
    outside = np.flatnonzero(apart > 0)
    if outside.size == 0:
        return int(curve.n[0])
    start = int(outside[-1])
    if start == curve.n.size - 1:
        raise ValueError(
            f"curve: the delta method is still off by a factor {ratio[-1]:.4g} at the largest n ="
            f" {int(curve.n[-1])}; give larger n"
        )
    if not math.isfinite(apart[start]):
        return int(curve.n[start + 1])
    share = apart[start] / (apart[start] - apart[start + 1])
    log_n = np.log(curve.n[start : start + 2].astype(float))
    return math.ceil(math.exp(float(log_n[0] + share * (log_n[1] - log_n[0]))) - 1e-9)


def log_rms(curve: ErrorCurve) -> Callable[[Any], Floats]:
    """log rms as a function of log n between the curve's ends: cubic Hermite with analytic slopes,
    else monotone cubic.

    A curve that ends in exactly 0 keeps each of N keys with probability n/N, N the first n without
    error. Its error is sqrt(1/n - 1/N) times a factor that varies slowly, and that factor is
    interpolated, a power of n from the last n below N on. A curve that is 0 throughout is 0 in
    between: -inf here.
    """
    curve = as_kind(curve, ErrorCurve, "curve").ascending()
    positive = curve.rms > 0
    last = int(positive.sum())
    if not positive[:last].all():
        first = int(np.flatnonzero(~positive)[0])
        raise ValueError(
            f"curve: the error is 0 at n = {curve.n[first]} and above 0 at a larger n, so there is"
            " no curve in between; leave that n out"
        )
    if last == 0:
        return lambda x: np.full_like(np.asarray(x, dtype=float), -np.inf)
    n, height = curve.n.astype(float), np.log(curve.rms[:last])
    if last == n.size:
        return _spline(np.log(n), height, curve.slope)
    return _until_zero(n[:last], height, n[last])


def _until_zero(n: Floats, height: Floats, total: float) -> Callable[[Any], Floats]:
    """height = log factor(n) + log(1/n - 1/total) / 2, -inf from ``total`` on."""
    factor = _spline(np.log(n), height - 0.5 * np.log(1 / n - 1 / total), None)
    last = math.log(n[-1])
    rise = 0.0
    if n.size > 1:
        step = 0.01 * (last - math.log(n[-2]))
        rise = float((factor(last) - factor(last - step)) / step)

    def kept(log_n: Any) -> Floats:
        with np.errstate(divide="ignore"):  # log 0 from n = total on
            gap = np.maximum(np.exp(-log_n) - 1 / total, 0.0)
            gap = np.where(log_n >= math.log(total) * (1 - 1e-15), 0.0, gap)
            beyond = rise * np.maximum(log_n - last, 0.0)
            return np.asarray(factor(np.minimum(log_n, last)) + beyond + 0.5 * np.log(gap))

    return kept


def _spline(log_n: Floats, height: Floats, slope: Floats | None) -> Callable[[Any], Floats]:
    if log_n.size == 1:
        return lambda x: np.full_like(np.asarray(x, dtype=float), height[0])
    if slope is not None and np.isfinite(slope).all():
        return CubicHermiteSpline(log_n, height, slope)  # type: ignore[no-any-return]
    return PchipInterpolator(log_n, height)  # type: ignore[no-any-return]


def _first_crossing(curve: ErrorCurve, level: float) -> int | None:
    """The smallest n where the interpolated log rms falls to the level, or None."""
    log_n = np.log(curve.n.astype(float))
    spline = log_rms(curve)
    grid = np.unique(np.concatenate([np.linspace(log_n[0], log_n[-1], GRID), log_n]))
    below = np.flatnonzero(spline(grid) <= level)
    if below.size == 0:
        return None
    low, high = grid[max(int(below[0]) - 1, 0)], grid[below[0]]
    for _ in range(ROUNDS):
        grid = np.linspace(low, high, PIECES + 1)
        first = max(int(np.argmax(spline(grid) <= level)), 1)
        low, high = grid[first - 1], grid[first]
    return min(math.ceil(math.exp(high) - 1e-6), int(curve.n[-1]))
