"""Matrices and rows of vectors: products, norms, covariances with their roots."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from scipy.sparse.linalg import svds
from torch import Tensor

from esscher.inputs import as_positive

DENSE = 512  # up to this size all singular values are computed
SMALLEST, LARGEST = 1e-100, 1e100  # products of three such numbers stay in the range of float64


def in_range(x: Tensor, name: str) -> Tensor:
    """The tensor itself; ValueError where its largest number is not 0 or from 1e-100 to 1e100."""
    largest = max(abs(float(end)) for end in torch.aminmax(x.detach())) if x.numel() else 0.0
    if largest and not SMALLEST <= largest <= LARGEST:
        raise ValueError(
            f"{name}: expected numbers of sizes up to 1e100, the largest at least 1e-100, got"
            f" {largest:.3g} as the largest; choose other units"
        )
    return x


def as_size(value: Any, name: str) -> float:
    """A number from 1e-100 to 1e100."""
    return float(in_range(torch.tensor(as_positive(value, name), dtype=torch.float64), name))


# ---- diagonal or large matrices


def is_diagonal(matrix: Float64[Tensor, "r c"]) -> bool:
    """Whether a square matrix has no entry off its diagonal."""
    matrix = matrix.detach()
    if matrix.shape[0] != matrix.shape[1]:
        return False
    return int(torch.count_nonzero(matrix)) == int(torch.count_nonzero(matrix.diagonal()))


def is_multiple_of_identity(matrix: Float64[Tensor, "d d"], tol: float) -> bool:
    """Up to ``tol`` times its diagonal."""
    size = float(matrix.diagonal().mean())
    return bool((matrix - size * torch.eye(len(matrix)).to(matrix)).abs().max() <= tol * size)


def product(left: Float64[Tensor, "r m"], right: Float64[Tensor, "m c"]) -> Float64[Tensor, "r c"]:
    """left @ right, in O(r c) where a factor is diagonal."""
    if is_diagonal(left):
        return left.diagonal()[:, None] * right
    if is_diagonal(right):
        return left * right.diagonal()
    return left @ right


def largest_singular(matrix: Float64[Tensor, "r c"]) -> tuple[float, Float64[Tensor, " c"]]:
    """The largest singular value and its right vector: read off a diagonal, by Lanczos iteration
    (ARPACK) above ``DENSE``.
    """
    matrix = matrix.detach()
    if is_diagonal(matrix):
        sizes = matrix.diagonal().abs()
        top = int(sizes.argmax())
        vector = torch.zeros_like(sizes)
        vector[top] = 1.0
        return float(sizes[top]), vector
    if min(matrix.shape) <= DENSE:
        _, values, rows = torch.linalg.svd(matrix, full_matrices=False)
        return float(values[0]), rows[0]
    start = np.random.default_rng(0).standard_normal(min(matrix.shape))
    _, values, rows = svds(matrix.cpu().numpy(), k=1, v0=start)
    return float(values[0]), torch.from_numpy(rows[0].copy()).to(matrix)


def spectral_norm(matrix: Float64[Tensor, "r c"]) -> float:
    """||matrix||_2."""
    return largest_singular(matrix)[0]


def isotropic(V: Float64[Tensor, "d_out d"]) -> float:
    """(tr G)^2 + 2 tr G^2, G = V^T V: E|V g|^4 for standard normal g."""
    G = product(V.T, V)
    return float(G.trace() ** 2 + 2.0 * (G * G).sum())


# ---- rows of vectors


def norms(rows: Tensor) -> Float64[Tensor, "*batch"]:
    """Euclidean length of each row."""
    sizes: Tensor = torch.linalg.vector_norm(rows.double(), dim=-1)
    return sizes


def units(rows: Tensor) -> Float64[Tensor, "*batch d"]:
    """Each row at length one; rows of zeros stay."""
    return torch.nn.functional.normalize(rows.double(), dim=-1, eps=1e-300)


def ball_radius(points: Float64[Tensor, "N d"]) -> float:
    """Radius of a ball that holds all points, about their mean or the middle of their box."""
    middle = 0.5 * (points.min(dim=0).values + points.max(dim=0).values)
    return min(float((points - c).norm(dim=1).max()) for c in (points.mean(dim=0), middle))


# ---- covariances


def check_covariance(
    cov: Tensor, name: str
) -> tuple[Float64[Tensor, "d d"], Float64[Tensor, "d d"]]:
    """A covariance in float64 and a root L with L L^T = Sigma; ValueError when it is none."""
    if cov.ndim != 2 or cov.shape[0] != cov.shape[1]:
        raise ValueError(f"{name}: expected a square matrix, got shape {tuple(cov.shape)}")
    eps = torch.finfo(cov.dtype).eps
    cov = cov.double()
    size = float(cov.detach().abs().max())
    skew = float((cov - cov.T).detach().abs().max())
    if skew > eps**0.5 * size:
        raise ValueError(
            f"{name}: expected a symmetric matrix, got entries that differ from their transpose by"
            f" up to {skew:.3g}; pass (cov + cov.T) / 2 if that is rounding"
        )
    cov = 0.5 * (cov + cov.T)
    diagonal = is_diagonal(cov)
    if diagonal:
        values, vectors = cov.diagonal(), torch.ones_like(cov[0])
    else:
        values, vectors = torch.linalg.eigh(cov)
    lowest = float(values.detach().min())
    largest = max(float(values.detach().max()), size)
    if lowest < -10 * cov.shape[0] * eps * largest:
        raise ValueError(
            f"{name}: expected a positive semi-definite matrix, got an eigenvalue"
            f" {lowest / largest:.3g} times the largest; singular is allowed, negative is not"
        )
    root = vectors * values.clamp_min(0.0).sqrt()
    return cov, torch.diag(root) if diagonal else root
