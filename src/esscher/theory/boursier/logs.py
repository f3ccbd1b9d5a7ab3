"""Sums of products of powers and exponentials, added up from the logarithms of their terms.

e^{2d} at d = 4096 is 10^3557, and what multiplies it may be as small. A bound beyond float64 is
infinite, which is true.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from esscher.inputs import as_counts

__all__ = ["counts_of", "from_logs", "log_of"]

Floats = npt.NDArray[np.float64]


def log_of(number: Any) -> Any:
    """Logarithm of a number or numbers at least 0; -inf at 0."""
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(number, np.float64))


def from_logs(*terms: Any) -> Floats:
    """The sum of the exponentials, infinite beyond float64. A product of 0 and infinity (NaN) says
    nothing: infinite.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        total = np.exp(functools.reduce(np.logaddexp, terms))
    return np.asarray(np.nan_to_num(total, nan=np.inf, posinf=np.inf), np.float64)


def counts_of(n: Any) -> Floats:
    return as_counts(n, "n").astype(np.float64)
