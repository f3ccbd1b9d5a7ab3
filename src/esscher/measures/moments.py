"""Moments and cumulants of one number."""

from __future__ import annotations

import math

import numpy as np

__all__ = ["from_cumulants", "power", "to_cumulants"]


def power(number: float, order: int) -> float:
    """number^order, infinite beyond float64: an upper bound, where Python raises."""
    with np.errstate(over="ignore"):
        return float(np.float64(number) ** order)


def from_cumulants(cumulants: list[float]) -> float:
    """The last raw moment that goes with cumulants 1 .. r."""
    moments = [1.0]
    for r in range(1, len(cumulants) + 1):
        moments.append(sum(math.comb(r - 1, j - 1) * cumulants[j - 1] * moments[r - j] for j in range(1, r + 1)))
    return moments[-1]


def to_cumulants(raw: list[float]) -> list[float]:
    """Cumulants 1 .. r of raw moments 1 .. r."""
    moments = [1.0, *raw]
    cumulants: list[float] = []
    for r in range(1, len(moments)):
        below = sum(math.comb(r - 1, j - 1) * cumulants[j - 1] * moments[r - j] for j in range(1, r))
        cumulants.append(moments[r] - below)
    return cumulants
