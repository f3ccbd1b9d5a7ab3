"""Uniform laws on the sphere and in the ball."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.inputs import as_positive
from esscher.measures.base import Measure, noise_device
from esscher.measures.radial import scaled_log, scaled_mean, spread
from esscher.measures.wide import norms, units

__all__ = ["Ball", "Rotational", "Sphere"]


class Rotational(Measure):
    """A law that turns into itself under every rotation and whose transform is K_v(R |theta|), see ``radial``.

    With r = R |theta| and u = theta / |theta|: tilted mean R B_v(r) u, tilted covariance
    R^2 ( B_v(r)/r (I - u u^T) + B_v'(r) u u^T ).
    """

    def __init__(
        self, dim: Any, radius: Any = 1.0, *, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(dim, dtype, device)
        self.radius = as_positive(radius, "radius")

    @property
    @abstractmethod
    def order(self) -> float:
        """Bessel order v."""

    def _log_laplace(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, " m"]:
        return scaled_log(self.order, self.radius, rows)

    def _tilted_mean(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        return scaled_mean(self.order, self.radius, rows)

    def _tilted_cov(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d d"]:
        of_across, of_along = spread(self.order, self.radius, norms(rows))
        along = torch.einsum("mi,mj->mij", *(2 * [units(rows)]))
        across = torch.eye(self.dim, dtype=torch.float64, device=rows.device) - along
        return of_across[:, None, None] * across + of_along[:, None, None] * along

    def _extreme(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        return self.radius * units(rows)

    def _directions(self, n: int, generator: torch.Generator | None) -> Float64[Tensor, "n d"]:
        device = noise_device(generator, self.device)
        noise = torch.randn(n, self.dim, dtype=torch.float64, device=device, generator=generator)
        return torch.nn.functional.normalize(noise, eps=1e-300)


class Sphere(Rotational):
    """Uniform on the sphere of the given radius in R^dim; Bessel order d/2."""

    @property
    def order(self) -> float:
        return self.dim / 2

    def _sample(self, n: int, generator: torch.Generator | None) -> Float64[Tensor, "n d"]:
        return self.radius * self._directions(n, generator)


class Ball(Rotational):
    """Uniform in the ball of the given radius in R^dim; Bessel order d/2 + 1."""

    @property
    def order(self) -> float:
        return self.dim / 2 + 1

    def _sample(self, n: int, generator: torch.Generator | None) -> Float64[Tensor, "n d"]:
        directions = self._directions(n, generator)
        share = torch.rand(n, 1, dtype=torch.float64, device=directions.device, generator=generator)
        return self.radius * share ** (1 / self.dim) * directions
