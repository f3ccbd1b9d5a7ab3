"""Laws with independent coordinates: everything happens one coordinate at a time."""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.measures.base import Measure, noise_device
from esscher.measures.moments import from_cumulants, to_cumulants
from esscher.measures.spectrum import product

__all__ = ["Product"]


class Product(Measure):
    """d independent copies of one symmetric law on the line: K(theta) = sum_i k(theta_i)."""

    def __init__(self, dim: Any, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(dim, dtype, device)

    @abstractmethod
    def _log_laplace_1d(self, x: Tensor) -> Tensor:
        """k(x)."""

    @abstractmethod
    def _mean_1d(self, x: Tensor) -> Tensor:
        """k'(x)."""

    @abstractmethod
    def _variance_1d(self, x: Tensor) -> Tensor:
        """k''(x)."""

    @abstractmethod
    def _quantile_1d(self, u: Tensor) -> Tensor:
        """The token whose distribution function is u."""

    @abstractmethod
    def _moment_1d(self, order: int) -> float:
        """E y_i^order, ``order`` even; infinite beyond float64."""

    def _sigma_1d(self) -> float | None:
        """A sub-Gaussian parameter of one coordinate: k(x) <= sigma^2 x^2 / 2 for every x."""
        return None

    def _edge_1d(self) -> float | None:
        """Largest |y_i|, of a bounded law."""
        return None

    def _log_laplace(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, " m"]:
        return self._log_laplace_1d(rows).sum(-1)

    def _tilted_mean(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        return self._mean_1d(rows)

    def _tilted_cov(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d d"]:
        return torch.diag_embed(self._variance_1d(rows))

    def _sample(self, n: int, generator: torch.Generator | None) -> Float64[Tensor, "n d"]:
        device = noise_device(generator, self.device)
        return self._quantile_1d(
            torch.rand(n, self.dim, dtype=torch.float64, device=device, generator=generator)
        )

    @property
    def is_even(self) -> bool:
        return True

    def _extreme(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        edge = self._edge_1d()
        return super()._extreme(rows) if edge is None else edge * rows.sign()

    def support_radius(self) -> float | None:
        edge = self._edge_1d()
        return None if edge is None else edge * math.sqrt(self.dim)

    @cached_property
    def subgaussian_roots(self) -> list[Float64[Tensor, "d d"]] | None:
        """S = sigma^2 I, coordinates being independent."""
        sigma = self._sigma_1d()
        return (
            None
            if sigma is None
            else [sigma * torch.eye(self.dim, dtype=torch.float64, device=self.device)]
        )

    def _norm_moment(self, order: int) -> float:
        """Cumulants of |y|^2 are d times those of y_i^2."""
        cumulants = to_cumulants([self._moment_1d(2 * r) for r in range(1, order // 2 + 1)])
        return _or_infinite(from_cumulants([self.dim * k for k in cumulants]))

    def _value_fourth_moment(self, V: Float64[Tensor, "d_out d"]) -> float:
        """m_2^2 ((tr G)^2 + 2 tr G^2) + (m_4 - 3 m_2^2) sum_i G_ii^2, G = V^T V."""
        G = product(V.T, V)
        isotropic = float(G.trace() ** 2 + 2.0 * (G * G).sum())
        m2, m4 = self._moment_1d(2), self._moment_1d(4)
        return _or_infinite(
            m2 * m2 * isotropic + (m4 - 3.0 * m2 * m2) * float((G.diagonal() ** 2).sum())
        )


def _or_infinite(moment: float) -> float:
    """inf - inf: beyond float64."""
    return math.inf if math.isnan(moment) else moment
