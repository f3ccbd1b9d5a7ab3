"""Attention written out plainly in long double: every score, every weight."""

from __future__ import annotations

import numpy as np

__all__ = ["LONG", "Softmax", "hardmax", "linear", "softmax"]

Array = np.ndarray
LONG = np.longdouble


class Softmax:
    """Weights and outputs for queries (m, k) on keys (n, k) with values (n, d); ``size``: largest
    sum of |q_i k_i| scale.
    """

    def __init__(
        self, q: Array, k: Array, v: Array, scale: float, mask: Array | None = None
    ) -> None:
        q, k, v = q.astype(LONG), k.astype(LONG), v.astype(LONG)
        scores = LONG(scale) * (q @ k.T)
        visible = np.ones(scores.shape, dtype=bool) if mask is None else mask
        self.size = float(min(LONG(scale) * (np.abs(q) @ np.abs(k).T).max(), LONG(1e300)))
        self.score = float(min(np.abs(scores).max(), LONG(1e300)))
        shifted = np.where(
            visible, scores - np.where(visible, scores, -np.inf).max(axis=1, keepdims=True), -np.inf
        )
        weights = np.exp(shifted)
        self.weights = weights / weights.sum(axis=1, keepdims=True)
        self.out = self.weights @ v
        # how far apart the values are that a change of the weights can move between
        middle = self.out[:, None, :]
        self.gap = (np.abs(v[None] - middle) * visible[:, :, None]).max(axis=1)
        self.value = (np.abs(v[None]) * visible[:, :, None]).max(axis=1)


def softmax(q: Array, k: Array, v: Array, scale: float, mask: Array | None = None) -> Softmax:
    return Softmax(q, k, v, scale, mask)


def linear(q: Array, k: Array, v: Array, scale: float) -> tuple[Array, Array]:
    """(1/n) sum_j scale <q_i, k_j> v_j, and the same with every number replaced by its size."""
    q, k, v = q.astype(LONG), k.astype(LONG), v.astype(LONG)
    return LONG(scale) * (q @ (k.T @ v)) / len(k), LONG(scale) * (
        np.abs(q) @ (np.abs(k).T @ np.abs(v))
    ) / len(k)


def hardmax(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Mean of the values of the highest keys (m, d); which keys are within rounding of the highest
    (m, n); scores.
    """
    q, k = q.astype(LONG), k.astype(LONG)
    scores = q @ k.T
    size = np.abs(q) @ np.abs(k).T
    best = scores.max(axis=1, keepdims=True)
    near = scores >= best - 1e-11 * np.maximum(size.max(axis=1, keepdims=True), LONG(1))
    exactly = scores == best
    out = exactly.astype(LONG) @ v.astype(LONG) / exactly.sum(axis=1, keepdims=True)
    return out, near, exactly
