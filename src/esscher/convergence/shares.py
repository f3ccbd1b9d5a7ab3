"""A fixed number of tokens shared between heads, so that the summed squared error is smallest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from esscher.convergence.budget import log_rms
from esscher.convergence.curve import ErrorCurve, Floats
from esscher.inputs import as_count

__all__ = ["Shares", "share_tokens"]

Counts = npt.NDArray[np.int64]

GRID = 512  # token numbers at which a curve is looked at


@dataclass(frozen=True)
class Shares:
    """How many of ``total`` tokens each curve gets, and the summed squared error, beside the same number for each.

    ``floor`` is a bound that no split can beat (that of the curves' convex hulls), so floor <= squared_error.
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
        return self.squared_error / self.uniform_squared_error if self.uniform_squared_error > 0 else 1.0


def share_tokens(curves: Sequence[ErrorCurve], total: Any) -> Shares:
    """Token numbers n_i with sum n_i = total that minimise sum_i MSE_i(n_i), MSE_i the squared rms of curve i.

    At the optimum of convex curves all heads gain equally from one more token, MSE_i'(n_i) = -lambda. Each curve is
    replaced by the lower convex hull of its interpolation; the hulls' segments, steepest first, then give the exact
    optimum of the hulls, and between the ends of at most one segment a curve may lie above its hull. The squared error
    given is the curves' own. A curve's first and last n are the least and the most it can get.
    """
    total = as_count(total, "total")
    if not curves:
        raise ValueError("curves: expected at least one, got none")
    least = np.array([int(curve.n[0]) for curve in curves])
    most = np.array([int(curve.n[-1]) for curve in curves])
    if not least.sum() <= total <= most.sum():
        raise ValueError(
            f"total: expected between {least.sum()} (the first n of every curve) and {most.sum()} (the last), got {total}"
        )
    hulls = [_hull(curve) for curve in curves]
    best, floor = _steepest_first(hulls, int(total))
    uniform = _uniform(least, most, int(total))
    return Shares(
        total=int(total),
        tokens=best,
        squared_error=_squared_error(curves, best),
        floor=floor,
        uniform=uniform,
        uniform_squared_error=_squared_error(curves, uniform),
    )


def _hull(curve: ErrorCurve) -> tuple[Floats, Floats]:
    """Corners (n, MSE) of the lower convex hull of a curve."""
    low, high = int(curve.n[0]), int(curve.n[-1])
    between = np.exp(np.linspace(np.log(low), np.log(high), GRID)).round().astype(np.int64)
    n = np.unique(np.concatenate([between, curve.n]))
    n = n[(n >= low) & (n <= high)]
    mse = _mse(curve, n)
    corners: list[int] = []
    for i in range(n.size):
        while len(corners) > 1:
            a, b = corners[-2], corners[-1]
            if (mse[b] - mse[a]) * (n[i] - n[b]) < (mse[i] - mse[b]) * (n[b] - n[a]):
                break
            corners.pop()
        corners.append(i)
    return n[corners].astype(float), mse[corners]


def _steepest_first(hulls: list[tuple[Floats, Floats]], total: int) -> tuple[Counts, float]:
    """Whole token numbers, and the hulls' own squared error there."""
    tokens = np.array([corners[0] for corners, _ in hulls])
    error = float(sum(mse[0] for _, mse in hulls))
    segments = [
        (float((mse[j + 1] - mse[j]) / (n[j + 1] - n[j])), i, j) for i, (n, mse) in enumerate(hulls) for j in range(n.size - 1)
    ]
    left = total - int(tokens.sum())
    for slope, i, j in sorted(segments):  # within a hull slopes rise, so its segments come in their order
        step = min(left, int(hulls[i][0][j + 1] - hulls[i][0][j]))
        tokens[i] += step
        error += slope * step
        left -= step
        if left == 0:
            break
    return tokens.astype(np.int64), max(error, 0.0)


def _uniform(least: Counts, most: Counts, total: int) -> Counts:
    """The same number for all, within each curve's ends; the tokens that do not divide go to the first ones."""
    low, high = 0, int(most.max())
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if int(np.clip(middle, least, most).sum()) <= total else (low, middle - 1)
    tokens = np.clip(low, least, most)
    free = np.flatnonzero((tokens < most) & (tokens >= low))[: total - int(tokens.sum())]
    tokens[free] += 1
    return np.asarray(tokens, dtype=np.int64)


def _mse(curve: ErrorCurve, n: Counts) -> Floats:
    return np.asarray(np.exp(2 * log_rms(curve)(np.log(n.astype(float)))))


def _squared_error(curves: Sequence[ErrorCurve], tokens: Counts) -> float:
    return float(sum(_mse(curve, np.array([count]))[0] for curve, count in zip(curves, tokens, strict=True)))
