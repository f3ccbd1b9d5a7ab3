"""Tokens +1 or -1: attention on n of them is a function of a binomial count, so statements at one
query can be enumerated.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

__all__ = ["coin_errors"]

Floats = npt.NDArray[np.float64]


def coin_errors(n: int, tilt: float, value: float = 1.0) -> tuple[Floats, Floats]:
    """Errors of the softmax average of ``value`` y over n tokens y = +-1 at a tilt, and the chance
    of each; sigma = d = 1.
    """
    up = np.arange(n + 1) * math.exp(tilt)
    down = (n - np.arange(n + 1)) * math.exp(-tilt)
    errors = value * ((up - down) / (up + down) - math.tanh(tilt))
    return errors, np.asarray(binom.pmf(np.arange(n + 1), n, 0.5))
