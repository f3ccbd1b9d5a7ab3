"""Gaussian tokens: the one law whose attention limit is affine in the query."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.inputs import as_tensor, is_finite
from esscher.measures.base import Measure, noise_device
from esscher.measures.spectrum import is_diagonal
from esscher.measures.wide import shift, wide_scores

__all__ = ["Gaussian", "check_covariance"]

SPREAD = 20.0  # coordinates further apart than 2^20 are brought to one size, or eigh's rounding would drown the smallest


class Gaussian(Measure):
    """N(m, Sigma), Sigma possibly singular.

    K(theta) = <m, theta> + theta^T Sigma theta / 2;  tilted mean m + Sigma theta;  tilted covariance Sigma.
    """

    def __init__(self, cov: Any, mean: Any = None) -> None:
        cov = as_tensor(cov, "cov", ndim=2)
        super().__init__(cov.shape[0], cov.dtype, cov.device)
        self._cov, self._root = check_covariance(cov, "cov")
        if mean is None:
            self._mean = self._zero
        else:
            self._mean = as_tensor(mean, "mean", ndim=1, last=self.dim).to(self._cov)

    @property
    def root(self) -> Float64[Tensor, "d d"]:
        """L with L L^T = Sigma; diagonal where Sigma is."""
        return self._root

    @cached_property
    def spectrum(self) -> Float64[Tensor, " d"]:
        """The eigenvalues of Sigma."""
        return self._cov.diagonal() if is_diagonal(self._cov) else torch.linalg.eigvalsh(self._cov).clamp_min(0.0)

    def _log_laplace(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, " m"]:
        plain = rows @ self._mean + 0.5 * ((rows @ self._cov) * rows).sum(-1)
        if is_finite(plain):
            return plain
        u, push, exponent, _ = self._wide_push(rows)
        square = shift(0.5 * (push * u).sum(-1), 2.0 * exponent[:, 0])
        return wide_scores(rows, self._mean[None])[:, 0] + square

    def _tilted_mean(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        plain = self._mean + rows @ self._cov
        if is_finite(plain):
            return plain
        _, push, exponent, sizes = self._wide_push(rows)
        return self._mean + shift(push, exponent + sizes)

    def _wide_push(self, rows: Float64[Tensor, "m d"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(u, C u, a, e) with D theta = 2^a u, |u_i| < 1, where Sigma = D C D, D_ii = 2^{e_i} and |C_ij| <= 1.

        Then Sigma theta = 2^a D C u: where the plain product overflows on the way, this one does only in the answer.
        """
        sizes = _half_exponents(self._cov)
        exponents = torch.frexp(rows.detach()).exponent + sizes
        largest = exponents.masked_fill(rows.detach() == 0.0, -torch.inf).amax(-1, keepdim=True)
        largest = largest.masked_fill(largest == -torch.inf, 0.0)
        u = shift(rows, sizes - largest)
        return u, u @ shift(self._cov, -(sizes[:, None] + sizes)), largest, sizes

    def _tilted_cov(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d d"]:
        return self._cov.expand(rows.shape[0], -1, -1)

    def _sample(self, n: int, generator: torch.Generator | None) -> Float64[Tensor, "n d"]:
        device = noise_device(generator, self.device)
        noise = torch.randn(n, self.dim, dtype=torch.float64, device=device, generator=generator)
        return self._mean + noise.to(self.device) @ self._root.T


def check_covariance(cov: Tensor, name: str) -> tuple[Float64[Tensor, "d d"], Float64[Tensor, "d d"]]:
    """A covariance in float64 and a root L with L L^T = Sigma; ValueError when it is not symmetric or not positive."""
    if cov.ndim != 2 or cov.shape[0] != cov.shape[1]:
        raise ValueError(f"{name}: expected a square matrix, got shape {tuple(cov.shape)}")
    eps = torch.finfo(cov.dtype).eps
    cov = cov.double()
    size = float(cov.detach().abs().max())
    skew = float((cov - cov.T).detach().abs().max())
    if skew > eps**0.5 * size:
        raise ValueError(
            f"{name}: expected a symmetric matrix, got entries that differ from their transpose by up to {skew:.3g}; "
            "pass (cov + cov.T) / 2 if that is rounding"
        )
    cov = 0.5 * cov + 0.5 * cov.T
    sizes = _half_exponents(cov)
    if float(sizes.max() - sizes.min()) <= SPREAD:
        sizes = sizes.max().expand_as(sizes)
    scaled = shift(cov, -(sizes[:, None] + sizes))
    if not bool(scaled.isfinite().all()):
        raise ValueError(f"{name}: expected a positive semi-definite matrix, got entries larger than their variances allow")
    diagonal = is_diagonal(scaled)
    values, vectors = (scaled.diagonal(), torch.ones_like(scaled[0])) if diagonal else torch.linalg.eigh(scaled)
    lowest, largest = float(values.detach().min()), max(float(values.detach().max()), float(scaled.detach().abs().max()))
    if lowest < -10 * cov.shape[0] * eps * largest:
        raise ValueError(
            f"{name}: expected a positive semi-definite matrix, got an eigenvalue {lowest / largest:.3g} times the "
            "largest; singular is allowed, negative is not"
        )
    root = vectors * values.clamp_min(0.0).sqrt()
    return cov, shift(torch.diag(root) if diagonal else root, sizes[:, None])


def _half_exponents(cov: Float64[Tensor, "d d"]) -> Float64[Tensor, " d"]:
    """e_i with Sigma_ii about 4^{e_i}, so that coordinate i has size 2^{e_i}; the largest of all where Sigma_ii is 0."""
    diagonal = cov.detach().diagonal()
    exponents = (0.5 * torch.frexp(diagonal).exponent.double()).ceil()
    positive = diagonal > 0.0
    largest = exponents[positive].max() if bool(positive.any()) else 0.0
    return torch.where(positive, exponents, largest)
