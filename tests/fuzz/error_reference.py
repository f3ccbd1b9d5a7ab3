"""Exact errors of attention on random keys a second time: by listing every draw, or by brute-force
quadrature.

    E|Gamma_n - Gamma|^2 = n int t E[e^2 |c|^2 exp(-te)] phi^{n-1} dt + n (n-1) int t |E[e c
        exp(-te)]|^2 phi^{n-2} dt

with e = exp(score), c = value - Gamma, phi(t) = E exp(-te), over atoms of given weight, in long
double, on a fine grid of log t without any shortcut. Continuous laws come as many atoms (Gauss
rules).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

__all__ = [
    "Atoms",
    "Errors",
    "by_listing",
    "by_listing_kept",
    "by_quadrature",
    "by_quadrature_kept",
]

Array = np.ndarray
LONG = np.longdouble


@dataclass(frozen=True)
class Atoms:
    """Scores (N,), log-weights (N,), values (N, d) and the variance of each value given its atom
    (N,).
    """

    scores: Array
    log_weights: Array
    values: Array
    spread: Array

    @property
    def limit(self) -> Array:
        p = np.exp(self.log_weights + self.scores - (self.log_weights + self.scores).max())
        return (p / p.sum()) @ self.values


@dataclass(frozen=True)
class Errors:
    """At each n: mean square error, bias (len n, d), E sum p^2."""

    mse: Array
    bias: Array
    sum_p2: Array


def by_quadrature(atoms: Atoms, n: list[int], step: float = 0.15) -> Errors:
    """Trapezoid rule in log t over all that can matter for these n; float64 keeps ten digits, since
    nothing cancels.
    """
    s = (atoms.scores - atoms.scores.max()).astype(float)
    w = np.exp((atoms.log_weights - atoms.log_weights.max()).astype(float))
    w = w / w.sum()
    c = (atoms.values - atoms.limit).astype(float)
    spread = (c**2).sum(axis=1) + atoms.spread.astype(float)
    count = np.array(n, dtype=float)[:, None]
    tau = np.arange(-math.log(max(n)) - 42.0, -s[w > 0].min() + 4.5, step)
    mse, bias, sum_p2 = np.zeros(len(n)), np.zeros((len(n), c.shape[1])), np.zeros(len(n))
    for part in np.array_split(tau, len(tau) * len(s) // 2**19 + 1):
        te = np.exp(np.minimum(part[:, None] + s, 300.0))
        decay, lost = np.exp(-te), -np.expm1(-te)
        gone = lost @ w
        with np.errstate(divide="ignore"):
            log_phi = np.where(gone < 0.5, np.log1p(-np.minimum(gone, 0.6)), np.log(decay @ w))
        # E e c = 0, so te may be taken from te exp(-te) while it is small: then nothing cancels
        single = np.where(
            (part < 0)[:, None], -(te * lost) @ (w[:, None] * c), (te * decay) @ (w[:, None] * c)
        )
        second = te * te * decay
        own, pair, cross = second @ (w * spread), second @ w, (single**2).sum(axis=1)
        one, two = (
            np.exp(np.where(count > k, (count - k) * np.maximum(log_phi, -1e300), 0.0))
            for k in (1, 2)
        )
        mse += step * count[:, 0] * (one @ own + (count[:, 0] - 1) * (two @ cross))
        sum_p2 += step * count[:, 0] * (one @ pair)
        bias += step * count * (one @ single)
    return Errors(mse, bias, sum_p2)


def by_listing(atoms: Atoms, n: int) -> Errors:
    """Every ordered draw of n atoms: few atoms, few draws."""
    w = np.exp(atoms.log_weights - atoms.log_weights.max()).astype(LONG)
    w = w / w.sum()
    limit = atoms.limit
    mse = sum_p2 = LONG(0)
    bias = np.zeros(atoms.values.shape[1], LONG)
    for draw in itertools.product(range(len(w)), repeat=n):
        chosen = list(draw)
        error, p2 = _error(atoms, chosen, limit)
        chance = np.prod(w[chosen])
        mse, bias, sum_p2 = (
            mse + chance * (error**2).sum(),
            bias + chance * error,
            sum_p2 + chance * p2,
        )
    return Errors(np.array([mse]), bias[None], np.array([sum_p2]))


def by_listing_kept(atoms: Atoms, n: int) -> Errors:
    """Every set of kept keys, each kept with chance n / N; no kept key is no error."""
    size = len(atoms.scores)
    f = LONG(n) / size
    limit = atoms.limit
    mse = sum_p2 = LONG(0)
    bias = np.zeros(atoms.values.shape[1], LONG)
    for kept in itertools.product([False, True], repeat=size):
        chosen = [i for i in range(size) if kept[i]]
        if not chosen:
            continue
        error, p2 = _error(atoms, chosen, limit)
        chance = f ** len(chosen) * (1 - f) ** (size - len(chosen))
        mse, bias, sum_p2 = (
            mse + chance * (error**2).sum(),
            bias + chance * error,
            sum_p2 + chance * p2,
        )
    return Errors(np.array([mse]), bias[None], np.array([sum_p2]))


def _error(atoms: Atoms, chosen: list[int], limit: Array) -> tuple[Array, LONG]:
    s = atoms.scores[chosen].astype(LONG)
    p = np.exp(s - s.max())
    p = p / p.sum()
    return p @ (atoms.values[chosen] - limit), (p * p).sum()


def by_quadrature_kept(atoms: Atoms, n: list[int], copies: int = 1, step: float = 0.15) -> Errors:
    """E|Gamma_f - Gamma|^2 = int t P(t) ( sum w' |c|^2 + |sum w c|^2 - sum w^2 |c|^2 ) dt for keys
    kept with chance f = n/N.

    ``copies``: so many of every key, whose factors are then powers and whose sums are multiples.
    """
    s = (atoms.scores - atoms.scores.max()).astype(float)
    c = (atoms.values - atoms.limit).astype(float)
    spread = (c**2).sum(axis=1)
    size = len(s) * copies
    tau = np.arange(-math.log(size) - 42.0, -s.min() + 4.5, step)
    te = np.exp(np.minimum(tau[:, None] + s, 300.0))
    decay, lost = np.exp(-te), -np.expm1(-te)
    mse, bias, sum_p2 = [], [], []
    for count in n:
        f, g = count / size, (size - count) / size
        d = g + f * decay
        with np.errstate(divide="ignore"):
            logs = np.where(f * lost < 0.5, np.log1p(-f * np.minimum(lost, 0.6 / f)), np.log(d))
            chance = step * np.exp(copies * np.maximum(logs.sum(axis=1), -1e300))
            # sum e c = 0, so f te may be taken away while te is small
            single = (
                copies
                * np.where(
                    (tau < 0)[:, None],
                    -f * g * te * lost / np.maximum(d, 1e-300),
                    f * te * decay / np.maximum(d, 1e-300),
                )
                @ c
            )
            square = copies * (f * g * te * te * decay / np.maximum(d, 1e-150) ** 2) @ spread
            pair = copies * (f * te * te * decay / np.maximum(d, 1e-300)).sum(axis=1)
        mse.append(chance @ (square + (single**2).sum(axis=1)))
        bias.append(chance @ single)
        sum_p2.append(chance @ pair)
    return Errors(np.array(mse), np.array(bias), np.array(sum_p2))
