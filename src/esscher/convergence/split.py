"""A fixed number of tokens shared between heads, so that the summed squared error is smallest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from esscher.convergence.budget import log_rms
from esscher.convergence.curve import ErrorCurve, Floats
from esscher.inputs import as_count, as_kind

__all__ = ["Counts", "Shares", "Sharing", "share_tokens"]

Counts = npt.NDArray[np.int64]

# errors whose squares, and sums of them, are floating-point numbers
SMALLEST, LARGEST = 1e-140, 1e150
GRID = 512  # token numbers at which a curve is looked at


@dataclass(frozen=True)
class Shares:
    """How many of ``total`` tokens each curve gets, and the summed squared error, beside the
    uniform split: the same share of its largest n for each.

    ``floor`` is a bound that no split can beat (that of the curves' convex hulls), so floor <=
    squared_error.
    """

    total: int
    tokens: Counts
    squared_error: float
    floor: float
    uniform: Counts
    uniform_squared_error: float

    @property
    def gain(self) -> float:
        """Summed squared error of the best split over that of the uniform one."""
        return (
            self.squared_error / self.uniform_squared_error
            if self.uniform_squared_error > 0
            else 1.0
        )


def share_tokens(curves: Sequence[ErrorCurve], total: Any) -> Shares:
    """Token numbers n_i with sum n_i = total that minimise sum_i MSE_i(n_i), MSE_i the squared rms
    of curve i.

    At the optimum of convex curves all heads gain equally from one more token, MSE_i'(n_i) =
    -lambda. Each curve is replaced by the lower convex hull of its interpolation; the hulls'
    segments, steepest first, then give the exact optimum of the hulls, and between the ends of at
    most one segment a curve may lie above its hull. The squared error given is the curves' own. A
    curve's least and largest n are the least and the most it can get; one point: that many.
    """
    return Sharing(curves).split(total)


class Sharing:
    """Curves prepared for splits of many totals."""

    def __init__(self, curves: Sequence[ErrorCurve]) -> None:
        if not isinstance(curves, Sequence) or not curves:
            raise ValueError(f"curves: expected a list of at least one ErrorCurve, got {curves!r}")
        curves = [as_kind(curve, ErrorCurve, "curves").ascending() for curve in curves]
        largest = max(float(curve.rms.max()) for curve in curves)
        if not (SMALLEST < largest < LARGEST or largest == 0):
            raise ValueError(
                f"curves: errors of the size {largest:g} have no squares in floating point; divide"
                " every rms by one number"
            )
        self.curves = [log_rms(curve) for curve in curves]
        self.least = np.array([int(curve.n[0]) for curve in curves])
        self.most = np.array([int(curve.n[-1]) for curve in curves])
        corners = [_hull(curve, spline) for curve, spline in zip(curves, self.curves, strict=True)]
        self.first_error = float(sum(mse[0] for _, mse in corners))
        owner = np.concatenate([np.full(n.size - 1, i) for i, (n, _) in enumerate(corners)])
        steps = np.concatenate([np.diff(n) for n, _ in corners])
        gains = np.concatenate([np.diff(mse) / np.diff(n) for n, mse in corners])
        # Within a hull slopes rise, so a stable order keeps each curve's segments in theirs.
        order = np.argsort(gains, kind="stable")
        self.owner, self.steps, self.gains = owner[order], steps[order], gains[order]

    def split(self, total: Any) -> Shares:
        """The best split of a total beside the uniform one."""
        total = as_count(total, "total")
        if not self.least.sum() <= total <= self.most.sum():
            raise ValueError(
                f"total: expected between {self.least.sum()} (the first n of every curve) and"
                f" {self.most.sum()} (the last), got {total}"
            )
        best, floor = self.steepest_first(total)
        uniform = self._uniform(total)
        error, uniform_error = self.squared_error(best), self.squared_error(uniform)
        if uniform_error < error:  # between the corners of a hull, where its curve lies above it
            best, error = uniform, uniform_error
        return Shares(total, best, error, min(floor, error), uniform, uniform_error)

    def fewest(self, target: float, *, uniform: bool = False) -> int:
        """The smallest total whose split, the best or the uniform one, has at most this summed
        squared error.

        To a hundred-thousandth of all tokens where there are that many.
        """
        low, high = int(self.least.sum()), int(self.most.sum())

        def error(total: int) -> float:
            return self.squared_error(
                self._uniform(total) if uniform else self.steepest_first(total)[0]
            )

        if error(low) <= target:
            return low
        slack = max(1, high // 10**5)
        while high - low > slack:
            middle = (low + high) // 2
            low, high = (low, middle) if error(middle) <= target else (middle, high)
        return high

    def squared_error(self, tokens: Counts) -> float:
        """Summed squared error when curve i gets tokens[i]."""
        logs = np.log(tokens.astype(float))
        return float(
            sum(np.exp(2 * spline(x)) for spline, x in zip(self.curves, logs, strict=True))
        )

    def steepest_first(self, total: int) -> tuple[Counts, float]:
        """Whole token numbers, and the hulls' own squared error there; with a larger total no curve
        gets fewer.
        """
        left = total - int(self.least.sum())
        before = np.cumsum(self.steps) - self.steps
        steps = np.clip(left - before, 0, self.steps)
        tokens = self.least + np.bincount(
            self.owner, steps, minlength=len(self.least)
        ).round().astype(np.int64)
        return tokens, max(self.first_error + float(self.gains @ steps), 0.0)

    def _uniform(self, total: int) -> Counts:
        """The same share of each curve's largest n, rounded down and within its ends; the tokens
        that are left go to the first curves that the next larger share gives one more.
        """
        all_of_them = int(self.most.max())

        def at(part: int) -> Counts:
            """The share part / all_of_them, in whole numbers of any size."""
            shares = [part * int(most) // all_of_them for most in self.most]
            return np.clip(np.array(shares, dtype=np.int64), self.least, self.most)

        low, high = 0, all_of_them
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if int(at(middle).sum()) <= total else (low, middle - 1)
        tokens = at(low)
        if low < all_of_them:
            more = np.flatnonzero(at(low + 1) > tokens)
            tokens[more[: total - int(tokens.sum())]] += 1
        return tokens


def _hull(curve: ErrorCurve, spline: Callable[[Any], Floats]) -> tuple[Floats, Floats]:
    """Corners (n, MSE) of the lower convex hull of a curve."""
    low, high = int(curve.n[0]), int(curve.n[-1])
    between = np.exp(np.linspace(np.log(low), np.log(high), GRID)).round().astype(np.int64)
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
