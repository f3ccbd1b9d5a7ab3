"""Small pools whose errors are known by brute force: every sequence of draws, every subset of kept
keys.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Truth:
    mse: float
    sum_p2: float
    bias: Floats


def softmax(scores: Floats) -> Floats:
    e = np.exp(scores - scores.max())
    out: Floats = e / e.sum()
    return out


def by_sequences(scores: Floats, values: Floats, n: int, weights: Floats | None = None) -> Truth:
    """Expectations over all N^n sequences of draws."""
    keys = len(scores)
    w = np.full(keys, 1 / keys) if weights is None else weights / weights.sum()
    limit = softmax(scores + np.log(w)) @ values
    mse, sum_p2, bias = 0.0, 0.0, np.zeros(values.shape[1])
    for draw in itertools.product(range(keys), repeat=n):
        rows = list(draw)
        p, chance = softmax(scores[rows]), np.prod(w[rows])
        error = p @ values[rows] - limit
        mse, sum_p2, bias = (
            mse + chance * error @ error,
            sum_p2 + chance * p @ p,
            bias + chance * error,
        )
    return Truth(float(mse), float(sum_p2), bias)


def by_subsets(scores: Floats, values: Floats, fraction: float) -> Truth:
    """Expectations over all 2^N subsets, the empty one counting as no error."""
    keys = len(scores)
    limit = softmax(scores) @ values
    mse, sum_p2, bias = 0.0, 0.0, np.zeros(values.shape[1])
    for mask in itertools.product([False, True], repeat=keys):
        kept = np.array(mask)
        if not kept.any():
            continue
        chance = np.prod(np.where(kept, fraction, 1 - fraction))
        p = softmax(scores[kept])
        error = p @ values[kept] - limit
        mse, sum_p2, bias = (
            mse + chance * error @ error,
            sum_p2 + chance * p @ p,
            bias + chance * error,
        )
    return Truth(float(mse), float(sum_p2), bias)
