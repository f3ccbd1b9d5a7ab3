"""Pictures of the evidence: points with intervals, and lines of theory, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Values = Sequence[float] | npt.NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """Points of a picture, with their intervals if they have any; ``line`` joins them."""

    label: str
    x: Values
    y: Values
    low: Values | None = None
    high: Values | None = None
    line: bool = False


@dataclass(frozen=True)
class Picture:
    """The evidence of a decision. ``log``: the logarithmic axes, "", "x", "y" or "xy"."""

    x: str
    y: str
    series: Sequence[Series]
    log: str = ""


def points(label: str, x: Any, y: Iterable[Any]) -> Series:
    """Points at x: numbers, or estimates with their intervals."""
    place, found = np.asarray(x, dtype=np.float64), np.array([*y], dtype=np.float64)
    return Series(label, place, *found.T) if found.ndim == 2 else Series(label, place, found)


def line(label: str, x: Any, y: Any) -> Series:
    """A line through numbers y, or at one height."""
    place, height = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    return Series(label, place, np.broadcast_to(height, place.shape), line=True)


def diagonal(label: str, x: Any) -> Series:
    """The line y = x, from the smallest x to the largest."""
    ends = [float(np.min(x)), float(np.max(x))]
    return line(label, ends, ends)
