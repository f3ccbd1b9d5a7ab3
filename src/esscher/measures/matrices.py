"""Matrices and rows of vectors: products, norms, covariances with their roots, ellipsoids, and
arithmetic at the ends of the float64 range.

Range: x = 2^e y with the largest |y| of each row in [1/2, 1), and the powers of two are put back
last, so that nothing overflows or vanishes unless the result does. Rows of ordinary size are left
as they are, e = 0: products of a few of them cannot leave the range.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float64
from scipy.sparse.linalg import LinearOperator, svds
from torch import Tensor

DENSE = 512  # up to this size all singular values are computed
ORDINARY = 100.0  # |e| up to which rows are left alone
# coordinates further apart than 2^20 are brought to one size: eigh would round the smallest away
SPREAD = 20.0
FLAT = 1e-6  # share of the trace that makes a flat ellipsoid solid


# ---- diagonal or large matrices


def is_diagonal(matrix: Float64[Tensor, "r c"]) -> bool:
    """Whether a square matrix has no entry off its diagonal."""
    matrix = matrix.detach()
    if matrix.shape[0] != matrix.shape[1]:
        return False
    return int(torch.count_nonzero(matrix)) == int(torch.count_nonzero(matrix.diagonal()))


def product(left: Float64[Tensor, "r m"], right: Float64[Tensor, "m c"]) -> Float64[Tensor, "r c"]:
    """left @ right, in O(r c) where a factor is diagonal."""
    if is_diagonal(left):
        return left.diagonal()[:, None] * right
    if is_diagonal(right):
        return left * right.diagonal()
    return left @ right


def largest_singular(matrix: Float64[Tensor, "r c"]) -> tuple[float, Float64[Tensor, " c"]]:
    """The largest singular value and its right vector.

    Diagonal: read off. Above ``DENSE``: Lanczos iteration to rounding (ARPACK), since all singular
    values cost r c min(r, c).
    """
    matrix = matrix.detach()
    if is_diagonal(matrix):
        sizes = matrix.diagonal().abs()
        top = int(sizes.argmax())
        vector = torch.zeros_like(sizes)
        vector[top] = 1.0
        return float(sizes[top]), vector
    size = float(matrix.abs().max())
    if min(matrix.shape) <= DENSE or size == 0.0:
        _, values, rows = torch.linalg.svd(matrix, full_matrices=False)
        return float(values[0]), rows[0]
    array = (matrix / size).cpu().numpy()  # squares of small entries would vanish
    operator = LinearOperator(
        array.shape, matvec=array.__matmul__, rmatvec=array.T.__matmul__, dtype=array.dtype
    )
    start = np.random.default_rng(0).standard_normal(min(array.shape))
    _, values, rows = svds(operator, k=1, v0=start, return_singular_vectors=True)
    return size * float(values[0]), torch.from_numpy(rows[0].copy()).to(matrix)


def spectral_norm(matrix: Float64[Tensor, "r c"]) -> float:
    """||matrix||_2."""
    return largest_singular(matrix)[0]


# ---- rows at the ends of the range


def split(
    x: Tensor, dim: int | tuple[int, ...] = -1, ordinary: float = ORDINARY
) -> tuple[Tensor, Tensor]:
    """(y, e), both float64, with x = 2^e y; e is shared along ``dim``, which is kept with length
    one.
    """
    largest = torch.linalg.vector_norm(x.detach(), torch.inf, dim=dim, keepdim=True).double()
    exponent = torch.frexp(largest).exponent.double()
    exponent = exponent.masked_fill(exponent.abs() <= ordinary, 0.0)
    return (shift(x.double(), -exponent) if bool(exponent.any()) else x.double()), exponent


def shift(x: Tensor, exponent: Tensor) -> Tensor:
    """2^exponent x, in two halves because 2^1074 is not a float64 while 2^1074 * 2^-1074 is."""
    half = (0.5 * exponent).floor()
    return x * torch.exp2(half) * torch.exp2(exponent - half)


def wide_scores(q: Tensor, k: Tensor, scale: float = 1.0) -> Float64[Tensor, "*batch m n"]:
    """scale <q_i, k_j> in float64: infinite only where the score itself is out of range."""
    (q, of_query), (k, of_key) = split(q), split(k)
    mantissa, of_scale = math.frexp(scale)
    return shift(mantissa * (q @ k.mT), of_query + of_key.mT + float(of_scale))


def norms(rows: Tensor) -> Float64[Tensor, "*batch"]:
    """Euclidean length of each row."""
    scaled, exponent = split(rows)
    return shift(torch.linalg.vector_norm(scaled, dim=-1), exponent[..., 0])


def units(rows: Tensor) -> Float64[Tensor, "*batch d"]:
    """Each row at length one; rows of zeros stay."""
    return torch.nn.functional.normalize(split(rows)[0], dim=-1, eps=1e-300)


# ---- covariances and what lies above them


def check_covariance(
    cov: Tensor, name: str
) -> tuple[Float64[Tensor, "d d"], Float64[Tensor, "d d"]]:
    """A covariance in float64 and a root L with L L^T = Sigma; ValueError when it is not symmetric
    or not positive.
    """
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
    cov = 0.5 * cov + 0.5 * cov.T
    sizes = half_exponents(cov)
    if float(sizes.max() - sizes.min()) <= SPREAD:
        sizes = sizes.max().expand_as(sizes)
    scaled = shift(cov, -(sizes[:, None] + sizes))
    if not bool(scaled.isfinite().all()):
        raise ValueError(
            f"{name}: expected a positive semi-definite matrix, got entries larger than their"
            " variances allow"
        )
    diagonal = is_diagonal(scaled)
    if diagonal:
        values, vectors = scaled.diagonal(), torch.ones_like(scaled[0])
    else:
        values, vectors = torch.linalg.eigh(scaled)
    lowest = float(values.detach().min())
    largest = max(float(values.detach().max()), float(scaled.detach().abs().max()))
    if lowest < -10 * cov.shape[0] * eps * largest:
        raise ValueError(
            f"{name}: expected a positive semi-definite matrix, got an eigenvalue"
            f" {lowest / largest:.3g} times the largest; singular is allowed, negative is not"
        )
    root = vectors * values.clamp_min(0.0).sqrt()
    return cov, shift(torch.diag(root) if diagonal else root, sizes[:, None])


def half_exponents(cov: Float64[Tensor, "d d"]) -> Float64[Tensor, " d"]:
    """e_i with Sigma_ii about 4^{e_i}, so that coordinate i has size 2^{e_i}; the largest of all
    where Sigma_ii is 0.
    """
    diagonal = cov.detach().diagonal()
    exponents = (0.5 * torch.frexp(diagonal).exponent.double()).ceil()
    positive = diagonal > 0.0
    largest = exponents[positive].max() if bool(positive.any()) else 0.0
    return torch.where(positive, exponents, largest)


def ellipsoids(points: Float64[Tensor, "N d"]) -> list[Float64[Tensor, "d d"]]:
    """Matrices E with (y - c)^T E^{-1} (y - c) <= 1 for all points and some c.

    A ball first, and k (C + eps I) with C the scatter about c and k the largest (y - c)^T (C + eps
    I)^{-1} (y - c), for c the mean and c the middle of the bounding box.
    """
    centres = points.mean(dim=0), 0.5 * (points.min(dim=0).values + points.max(dim=0).values)
    eye = torch.eye(points.shape[1], dtype=points.dtype, device=points.device)
    radius = min(float((points - centre).norm(dim=1).max()) for centre in centres)
    out = [radius**2 * eye]
    for centre in centres:
        apart = points - centre
        scatter = apart.T @ apart / points.shape[0]
        size = float(scatter.trace())
        if size > 0.0 and math.isfinite(size):
            shape = scatter + FLAT * size * eye
            reach = (apart * torch.linalg.solve(shape, apart.T).T).sum(dim=1).max()
            out.append(float(reach) * (1.0 + FLAT) * shape)  # the solution's rounding
    return out


def upper_bound(
    first: Float64[Tensor, "d d"], second: Float64[Tensor, "d d"]
) -> Float64[Tensor, "d d"]:
    """first + (second - first)_+, the positive part: at least both in Loewner's order."""
    values, vectors = torch.linalg.eigh(second - first)
    upper: Tensor = first + (vectors * values.clamp_min(0.0)) @ vectors.T
    return upper
