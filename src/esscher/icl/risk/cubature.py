"""Averages over a Gaussian vector in several dimensions: a rule in radius and direction, turned at
random.

Radius: generalised Gauss-Laguerre in |g|^2 / 2. Direction: Mysovskikh's rule on the sphere, exact
to degree 5, on the vertices of a regular simplex, the midpoints of its edges and their opposites.
Each random rotation of the rule is an unbiased estimate (Genz and Monahan, SIAM J. Sci. Comput. 19,
1998), so a few of them give the error.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float64
from scipy.special import roots_genlaguerre
from torch import Tensor

from esscher.inputs import as_count

__all__ = ["Cubature", "gaussian_cubature"]

Floats = npt.NDArray[np.float64]

NEGLIGIBLE = 1e-15  # radial weight below which a shell is left out


@dataclass(frozen=True, eq=False)
class Cubature:
    """Points g (rotations x points x dim) and the weights of the points, which sum to 1."""

    points: Float64[Tensor, "rotations points dim"]
    weights: Float64[Tensor, " points"]


@lru_cache(maxsize=32)
def gaussian_cubature(
    dim: int, rotations: int = 8, shells: int = 16, seed: int = 0, even: bool = False
) -> Cubature:
    """The rule for N(0, I) in ``dim`` dimensions; the same arguments give the same points.

    ``even``: for even functions, with one of each pair of opposite points.
    """
    dim, rotations, shells = (
        as_count(dim, "dim"),
        as_count(rotations, "rotations"),
        as_count(shells, "shells"),
    )
    half_square, radial = roots_genlaguerre(shells, dim / 2 - 1)
    radial = radial / radial.sum()
    kept = radial > NEGLIGIBLE
    directions, angular = _directions(dim)
    if not even:
        directions, angular = (
            np.concatenate([directions, -directions]),
            np.concatenate([angular, angular]),
        )
    shell = np.sqrt(2.0 * half_square[kept])[:, None, None] * directions
    rotation = _rotations(dim, rotations, np.random.default_rng(seed))
    points = shell.reshape(-1, dim) @ rotation
    weights = np.outer(radial[kept], angular).ravel()
    return Cubature(torch.from_numpy(points), torch.from_numpy(weights / weights.sum()))


def _directions(dim: int) -> tuple[Floats, Floats]:
    if dim == 1:
        return np.ones((1, 1)), np.ones(1)
    centred = np.eye(dim + 1) - 1.0 / (dim + 1)
    basis = np.linalg.svd(centred)[2][:dim]  # the hyperplane in which the simplex lies
    vertices = centred @ basis.T
    first, second = np.triu_indices(dim + 1, 1)
    middles = vertices[first] + vertices[second]
    points = np.concatenate([vertices, middles])
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    at_vertex = (7 - dim) * dim / ((dim + 1) ** 2 * (dim + 2))
    at_middle = 4 * (dim - 1) ** 2 / (dim * (dim + 1) ** 2 * (dim + 2))
    return points, np.concatenate([np.full(dim + 1, at_vertex), np.full(first.size, at_middle)])


def _rotations(dim: int, count: int, rng: np.random.Generator) -> Floats:
    """Uniform orthogonal matrices."""
    q, r = np.linalg.qr(rng.standard_normal((count, dim, dim)))
    return np.asarray(q * np.sign(np.diagonal(r, axis1=1, axis2=2))[:, None, :])
