"""From a curve to token numbers: how many are needed, and the best split between heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.interpolate import CubicHermiteSpline, PchipInterpolator
from scipy.optimize import bisect

from esscher.errors.curve import ErrorCurve, Floats
from esscher.inputs import as_kind, as_positive

GRID = 4001  # points of log n on which a crossing is first looked for


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
            f" {curve.relative[-1]:.4g} at the largest n = {int(curve.n[-1]):,}; give larger n"
        )
    return first


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
    # by bisection, since a curve may end in -inf
    root = bisect(lambda x: 1.0 if spline(x) > level else -1.0, low, high, xtol=1e-14)
    return min(math.ceil(math.exp(root) - 1e-6), int(curve.n[-1]))


# ---- A fixed number of tokens shared between heads, so that the summed squared error is
# smallest.

Counts = npt.NDArray[np.int64]

SPLIT_GRID = 512  # token numbers at which a curve is looked at


class Sharing:
    """Curves prepared for splits of many totals: token numbers n_i with sum n_i = total that
    minimise sum_i MSE_i(n_i), MSE_i the squared rms of curve i.

    At the optimum of convex curves all heads gain equally from one more token, MSE_i'(n_i) =
    -lambda. Each curve is replaced by the lower convex hull of its interpolation; the hulls'
    segments, steepest first, then give the exact optimum of the hulls, and between the ends of at
    most one segment a curve may lie above its hull. A curve's least and largest n are the least and
    the most it can get.
    """

    def __init__(self, curves: Sequence[ErrorCurve]) -> None:
        curves = [curve.ascending() for curve in curves]
        self.curves = [log_rms(curve) for curve in curves]
        self.least = np.array([int(curve.n[0]) for curve in curves])
        self.most = np.array([int(curve.n[-1]) for curve in curves])
        corners = [_hull(curve, spline) for curve, spline in zip(curves, self.curves, strict=True)]
        owner = np.concatenate([np.full(n.size - 1, i) for i, (n, _) in enumerate(corners)])
        steps = np.concatenate([np.diff(n) for n, _ in corners])
        gains = np.concatenate([np.diff(mse) / np.diff(n) for n, mse in corners])
        # within a hull slopes rise, so a stable order keeps each curve's segments in theirs
        order = np.argsort(gains, kind="stable")
        self.owner, self.steps = owner[order], steps[order]

    def best(self, total: int) -> Counts:
        """The best split of a total."""
        splits = [self.steepest_first(total), self.uniform(total)]
        # between the corners of a hull its curve lies above it, and the uniform split may be better
        return min(splits, key=self.squared_error)

    def fewest(self, target: float, split: Callable[[int], Counts]) -> int:
        """The smallest total whose ``split`` has at most this summed squared error, to a
        hundred-thousandth of all tokens.
        """
        low, high = int(self.least.sum()), int(self.most.sum())
        if self.squared_error(split(low)) <= target:
            return low
        slack = max(1, high // 10**5)
        while high - low > slack:
            middle = (low + high) // 2
            enough = self.squared_error(split(middle)) <= target
            low, high = (low, middle) if enough else (middle, high)
        return high

    def squared_error(self, tokens: Counts) -> float:
        """Summed squared error when curve i gets tokens[i]."""
        logs = np.log(tokens.astype(float))
        errors = (np.exp(2 * curve(x)) for curve, x in zip(self.curves, logs, strict=True))
        return float(sum(errors))

    def steepest_first(self, total: int) -> Counts:
        """The best split of the hulls; with a larger total no curve gets fewer."""
        left = total - int(self.least.sum())
        steps = np.clip(left - (np.cumsum(self.steps) - self.steps), 0, self.steps)
        added = np.bincount(self.owner, steps, minlength=len(self.least)).round()
        return self.least + added.astype(np.int64)

    def uniform(self, total: int) -> Counts:
        """The same share of each curve's largest n, rounded down and within its ends; the tokens
        that are left go to the first curves that the next larger share gives one more.
        """
        whole = int(self.most.max())

        def at(part: int) -> Counts:
            found: Counts = np.clip(part * self.most // whole, self.least, self.most)
            return found

        low, high = 0, whole
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if int(at(middle).sum()) <= total else (low, middle - 1)
        tokens = at(low)
        if low < whole:
            more = np.flatnonzero(at(low + 1) > tokens)
            tokens[more[: total - int(tokens.sum())]] += 1
        return tokens


def _hull(curve: ErrorCurve, spline: Callable[[Any], Floats]) -> tuple[Floats, Floats]:
    """Corners (n, MSE) of the lower convex hull of a curve."""
    low, high = int(curve.n[0]), int(curve.n[-1])
    between = np.exp(np.linspace(np.log(low), np.log(high), SPLIT_GRID)).round().astype(np.int64)
    n = np.unique(np.concatenate([between, curve.n]))
    n = n[(n >= low) & (n <= high)]
    mse = np.exp(2 * spline(np.log(n.astype(float))))
    corners: list[int] = []
    for i in range(n.size):
        while len(corners) > 1:
            a, b = corners[-2], corners[-1]
            if (mse[b] - mse[a]) * (n[i] - n[b]) < (mse[i] - mse[b]) * (n[b] - n[a]):
                break
            corners.pop()
        corners.append(i)
    return n[corners].astype(float), mse[corners]
