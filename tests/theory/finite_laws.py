"""Exact errors of softmax averages over finite laws: by enumerating all draws (small n), by
quadrature (any n).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Law:
    """A law of ``len(weights)`` tokens on the line, centred."""

    tokens: np.ndarray
    weights: np.ndarray

    def sigma(self) -> float:
        """Smallest sub-Gaussian parameter, sup of 2 K(t) / t^2 on a fine grid; 1e-6 above for the
        grid.
        """
        t = (
            np.concatenate([-np.geomspace(1e-3, 1e3, 4000), np.geomspace(1e-3, 1e3, 4000)])
            / np.abs(self.tokens).max()
        )
        scores = t[:, None] * self.tokens
        top = scores.max(axis=1)
        transform = top + np.log(np.exp(scores - top[:, None]) @ self.weights)
        return math.sqrt(
            max(float((2 * transform / t**2).max()), float(self.weights @ self.tokens**2))
        ) * (1 + 1e-6)


def random_law(rng: np.random.Generator, size: int) -> Law:
    """Random tokens and weights; weights spread over orders of magnitude so that rare tokens
    occur.
    """
    weights = np.exp(-rng.uniform(0, 6, size))
    weights /= weights.sum()
    tokens = rng.standard_normal(size)
    return Law(tokens - weights @ tokens, weights)


def draws(weights: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """All ways to draw n tokens from 2 or 3 kinds: counts (m, kinds) and their chances."""
    if weights.size == 2:
        first = np.arange(n + 1)
        counts = np.stack([first, n - first], axis=1)
    else:
        first, second = np.meshgrid(np.arange(n + 1), np.arange(n + 1), indexing="ij")
        keep = first + second <= n
        counts = np.stack([first[keep], second[keep], n - first[keep] - second[keep]], axis=1)
    factorials = np.array([math.lgamma(k + 1) for k in range(n + 1)])
    logs = factorials[n] - factorials[counts].sum(axis=1) + counts @ np.log(weights)
    return counts, np.exp(logs)


def softmax_errors(
    weights: np.ndarray, scores: np.ndarray, values: np.ndarray, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """Error R_n/S_n - R/S of the softmax average of ``values`` (kinds, k) in every draw, and the
    chances.
    """
    counts, chances = draws(weights, n)
    e = np.exp(scores - scores.max())
    limit = (weights * e) @ values / (weights @ e)
    parts = counts * e
    return (parts @ values) / parts.sum(axis=1, keepdims=True) - limit, chances


def mean_square_error(
    tokens: np.ndarray, weights: np.ndarray, tilt: np.ndarray, V: np.ndarray, n: np.ndarray
) -> np.ndarray:
    """E|Gamma_n - Gamma|^2 for n tokens drawn from a finite law, any n, by the trapezoid rule in
    log t.

    1/S^2 = int t exp(-tS) dt gives
        n int t E[e^2 |c|^2 exp(-te)] phi^{n-1} dt + n(n-1) int t |E[e c exp(-te)]|^2 phi^{n-2}
            dt, phi = E exp(-te).
    """
    scores = tokens @ tilt
    e = np.exp(scores - scores.max())
    c = tokens @ V.T
    c = c - (weights * e) @ c / (weights @ e)
    tau = np.arange(-math.log(float(n.max())) - 45.0, -math.log(e.min()) + 3.8, 0.1)
    te = np.exp(tau)[:, None] * e
    decay = np.exp(-te)
    phi = decay @ weights
    log_phi = np.where(phi < 0.5, np.log(phi), np.log1p(np.maximum(np.expm1(-te) @ weights, -0.9)))
    own = (te**2 * decay) @ (weights * (c**2).sum(axis=1))
    cross = (((te * decay) @ (weights[:, None] * c)) ** 2).sum(axis=1)
    total = [
        0.1
        * (
            k * own * np.exp((k - 1) * log_phi) + k * (k - 1) * cross * np.exp((k - 2) * log_phi)
        ).sum()
        for k in n.astype(float)
    ]
    return np.array(total)
