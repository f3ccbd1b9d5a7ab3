"""Covariances: symmetric, positive, with a root that rounding does not spoil."""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.measures.spectrum import is_diagonal
from esscher.measures.wide import shift

__all__ = ["check_covariance", "half_exponents"]

# coordinates further apart than 2^20 are brought to one size, or eigh's rounding would drown the
# smallest
SPREAD = 20.0


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
    values, vectors = (
        (scaled.diagonal(), torch.ones_like(scaled[0])) if diagonal else torch.linalg.eigh(scaled)
    )
    lowest, largest = (
        float(values.detach().min()),
        max(float(values.detach().max()), float(scaled.detach().abs().max())),
    )
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
