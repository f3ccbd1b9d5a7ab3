"""Ladders of n as people write them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from esscher.inputs import as_counts

__all__ = ["parse_ladder"]

POINTS_PER_DECADE = 4
MOST_POINTS = 10_000  # of a ladder


def parse_ladder(text: Any, name: str = "n") -> npt.NDArray[np.int64]:
    """Whole numbers from "1e3:1e12" (4 a decade), "1e3:1e12:40", "100,1000", a number or a list;
    increasing, each once.

    ``name`` is what a mistake is said of.
    """
    if not isinstance(text, str):
        ladder = as_counts(text, name)
    elif ":" in text:
        parts = text.split(":")
        if len(parts) not in (2, 3):
            raise ValueError(f"{name}: expected first:last or first:last:points, got {text!r}")
        first, last = as_counts([_number(part, name) for part in parts[:2]], name)
        points = (
            max(2, round(POINTS_PER_DECADE * math.log10(last / first)) + 1) if first < last else 1
        )
        if len(parts) == 3:
            points = int(as_counts([_number(parts[2], name)], f"{name} (points)")[0])
        if points > MOST_POINTS:
            raise ValueError(f"{name}: expected at most {MOST_POINTS} points, got {points}")
        ladder = np.unique(np.geomspace(float(first), float(last), points).round().astype(np.int64))
        if first > last:
            raise ValueError(f"{name}: expected first below last, got {text!r}")
    else:
        ladder = as_counts([_number(part, name) for part in text.split(",")], name)
    if ladder.size > MOST_POINTS:
        raise ValueError(f"{name}: expected at most {MOST_POINTS} points, got {ladder.size}")
    if (np.diff(ladder) <= 0).any():
        raise ValueError(f"{name}: expected increasing numbers, got {ladder.tolist()}")
    return ladder


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError as cause:
        raise ValueError(
            f"{name}: expected numbers such as 100,1000 or 1e3:1e12, got {text!r}"
        ) from cause
