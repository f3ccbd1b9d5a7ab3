"""Laws along one tilt as many atoms: Gauss rules and fine grids of numpy and scipy, for the
brute-force errors.
"""

from __future__ import annotations

import itertools

import numpy as np
import scipy.special

from tests.fuzz.error_reference import Atoms
from tests.fuzz.law_reference import (
    GaussianSpec,
    MixtureSpec,
    PoolSpec,
    ProductSpec,
    RadialSpec,
    Spec,
)

__all__ = ["atoms_along", "has_atoms"]

LONG = np.longdouble
CORNERS = 12  # largest dimension in which a Rademacher law is listed corner by corner


def has_atoms(spec: Spec) -> bool:
    """Whether the law along a tilt is a sum of atoms here."""
    if isinstance(spec, MixtureSpec):
        return all(has_atoms(p) for w, p in zip(spec.weights, spec.parts, strict=True) if w > 0)
    if isinstance(spec, ProductSpec):
        return spec.dim == 1 or (spec.kind == "rademacher" and spec.dim <= CORNERS)
    return True


def atoms_along(spec: Spec, theta: np.ndarray, V: np.ndarray, v0: np.ndarray) -> Atoms:
    """Scores <theta, y>, values V y + v0 given the score, and the trace of their covariance given
    it.
    """
    theta, V, v0 = theta.astype(float), V.astype(float), v0.astype(float)
    if isinstance(spec, MixtureSpec):
        parts = [
            (w, atoms_along(p, theta, V, v0))
            for w, p in zip(spec.weights, spec.parts, strict=True)
            if w > 0
        ]
        logs = [
            _normalised(atoms.log_weights) + np.log(w / spec.weights.sum()) for w, atoms in parts
        ]
        joined = [
            np.concatenate([getattr(atoms, name) for _, atoms in parts])
            for name in ("scores", "values", "spread")
        ]
        return Atoms(joined[0], np.concatenate(logs), joined[1], joined[2])
    if isinstance(spec, PoolSpec):
        used = spec.weights > 0
        return _points(
            spec.tokens[used], np.log(spec.weights[used] / spec.weights.sum()), theta, V, v0
        )
    if isinstance(spec, GaussianSpec):
        return _gaussian(spec, theta, V, v0)
    if isinstance(spec, RadialSpec):
        return _radial(spec, theta, V, v0)
    assert isinstance(spec, ProductSpec)
    if spec.kind == "rademacher":
        corners = spec.scale * np.array(list(itertools.product([-1.0, 1.0], repeat=spec.dim)))
        return _points(corners, np.full(len(corners), -spec.dim * np.log(2.0)), theta, V, v0)
    if spec.kind == "cube":
        x, w = np.polynomial.legendre.leggauss(_count(spec.scale * abs(theta[0])))
        return _points(spec.scale * x[:, None], np.log(w / 2), theta, V, v0)
    x, w = np.polynomial.legendre.leggauss(24)
    size = spec.scale * abs(theta[0])
    panels = np.concatenate([[0.0], np.geomspace(0.01, 90 / (1 - size), 120)])
    u = np.concatenate([a + (b - a) * (x + 1) / 2 for a, b in itertools.pairwise(panels)])
    weight = np.concatenate([(b - a) / 2 * w for a, b in itertools.pairwise(panels)])
    log_weights = np.log(weight / 2) - u
    return _points(
        spec.scale * np.concatenate([u, -u])[:, None],
        np.concatenate([log_weights, log_weights]),
        theta,
        V,
        v0,
    )


def _normalised(log_weights: np.ndarray) -> np.ndarray:
    return log_weights - log_weights.max() - np.log(np.exp(log_weights - log_weights.max()).sum())


def _count(score: float) -> int:
    return int(120 + 8 * min(score, 200))


def _points(
    tokens: np.ndarray, log_weights: np.ndarray, theta: np.ndarray, V: np.ndarray, v0: np.ndarray
) -> Atoms:
    scores = tokens.astype(LONG) @ theta.astype(LONG)
    return Atoms(
        scores,
        log_weights.astype(LONG),
        (tokens @ V.T + v0).astype(LONG),
        np.zeros(len(tokens), LONG),
    )


def _gaussian(spec: GaussianSpec, theta: np.ndarray, V: np.ndarray, v0: np.ndarray) -> Atoms:
    push = spec.cov @ theta
    s = float(np.sqrt(max(theta @ push, 0.0)))
    total = float(np.trace(V @ spec.cov @ V.T))
    middle = V @ spec.mean + v0
    if s == 0.0:
        return Atoms(
            np.array([LONG(theta @ spec.mean)]),
            np.zeros(1, LONG),
            middle[None].astype(LONG),
            np.array([LONG(total)]),
        )
    g = np.arange(-13.0, 2 * s + 13.0, min(0.15, 0.2 / s))
    along = V @ push / s
    spread = max(total - float(along @ along), 0.0)
    values = middle + g[:, None] * along
    scores = theta @ spec.mean + s * g
    return Atoms(
        scores.astype(LONG),
        (-0.5 * g * g).astype(LONG),
        values.astype(LONG),
        np.full(len(g), spread, LONG),
    )


def _radial(spec: RadialSpec, theta: np.ndarray, V: np.ndarray, v0: np.ndarray) -> Atoms:
    length = float(np.linalg.norm(theta))
    u = theta / length if length > 0 else np.eye(spec.dim)[0]
    p = spec.dim + (2 if spec.order > spec.dim / 2 else 0)
    if p == 1:
        x, w = np.array([-1.0, 1.0]), np.array([0.5, 0.5])
    else:
        x, w = scipy.special.roots_jacobi(_count(spec.radius * length), (p - 3) / 2, (p - 3) / 2)
    along = spec.radius * (V @ u)
    across = spec.radius**2 * float((V * V).sum()) - float(along @ along)
    spread = (1 - x * x) / max(p - 1, 1) * across
    keep = w > 0
    values = v0 + x[:, None] * along
    return Atoms(
        (spec.radius * length * x)[keep].astype(LONG),
        np.log(w[keep]).astype(LONG),
        values[keep].astype(LONG),
        spread[keep].astype(LONG),
    )
