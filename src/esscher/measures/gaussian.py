"""Gaussian tokens: the one law whose attention limit is affine in the query."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.inputs import as_tensor
from esscher.measures.base import Measure, noise_device

__all__ = ["Gaussian", "check_covariance"]


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
        """L with L L^T = Sigma."""
        return self._root

    def _log_laplace(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, " m"]:
        return rows @ self._mean + 0.5 * ((rows @ self._cov) * rows).sum(-1)

    def _tilted_mean(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        return self._mean + rows @ self._cov

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
    size = float(cov.abs().max())
    skew = float((cov - cov.T).abs().max())
    if skew > eps**0.5 * size:
        raise ValueError(
            f"{name}: expected a symmetric matrix, got entries that differ from their transpose by up to {skew:.3g}; "
            "pass (cov + cov.T) / 2 if that is rounding"
        )
    cov = 0.5 * (cov + cov.T)
    values, vectors = torch.linalg.eigh(cov)
    lowest = float(values[0])
    if lowest < -10 * cov.shape[0] * eps * max(float(values[-1]), size):
        raise ValueError(
            f"{name}: expected a positive semi-definite matrix, got the eigenvalue {lowest:.3g}; "
            "singular is allowed, negative is not"
        )
    return cov, vectors * values.clamp_min(0.0).sqrt()
