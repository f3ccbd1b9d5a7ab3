"""Numbers of a rule, checked where it is written."""

from __future__ import annotations

import math
from typing import Any

from esscher.keep.registry import refused

__all__ = ["as_between", "as_fraction", "as_size"]


def as_size(value: Any, name: str, *, least: int = 1) -> int | None:
    """A whole number of keys, or None where it is left open."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise refused(f"{name}: expected a whole number of at least {least}, got {value!r}")
    return value


def as_fraction(value: Any, name: str) -> float | None:
    """A probability above 0 and up to 1, or None where it is left open."""
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value <= 1
        or math.isnan(value)
    ):
        raise refused(f"{name}: expected a probability above 0 and up to 1, got {value!r}")
    return float(value)


def as_between(value: Any, name: str, low: float, high: float) -> float:
    """A number above ``low`` and below ``high``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < high:
        raise refused(f"{name}: expected a number above {low:g} and below {high:g}, got {value!r}")
    return float(value)
