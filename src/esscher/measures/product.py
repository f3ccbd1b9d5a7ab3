"""Laws with independent coordinates: everything happens one coordinate at a time."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.inputs import as_positive
from esscher.measures.base import Measure, noise_device
from esscher.measures.radial import scaled_log, scaled_mean, sech_squared, spread

__all__ = ["Cube", "Laplace", "Product", "Rademacher"]


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

    def _log_laplace(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, " m"]:
        return self._log_laplace_1d(rows).sum(-1)

    def _tilted_mean(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        return self._mean_1d(rows)

    def _tilted_cov(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d d"]:
        return torch.diag_embed(self._variance_1d(rows))

    def _sample(self, n: int, generator: torch.Generator | None) -> Float64[Tensor, "n d"]:
        device = noise_device(generator, self.device)
        return self._quantile_1d(torch.rand(n, self.dim, dtype=torch.float64, device=device, generator=generator))


class Rademacher(Product):
    """Each coordinate is +scale or -scale with equal chance: k(x) = log cosh(scale x), tilted mean scale tanh."""

    def __init__(
        self, dim: Any, scale: Any = 1.0, *, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(dim, dtype, device)
        self.scale = as_positive(scale, "scale")

    def _log_laplace_1d(self, x: Tensor) -> Tensor:
        return scaled_log(0.5, self.scale, x[..., None])

    def _mean_1d(self, x: Tensor) -> Tensor:
        return self.scale * torch.tanh(self.scale * x)

    def _variance_1d(self, x: Tensor) -> Tensor:
        return sech_squared(self.scale, x.abs())

    def _quantile_1d(self, u: Tensor) -> Tensor:
        return self.scale * (2.0 * (u >= 0.5).to(u.dtype) - 1.0)

    def _extreme(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        return self.scale * rows.sign()


class Cube(Product):
    """Uniform on [-half_width, half_width]^dim: k(x) = log(sinh(ax) / (ax)), tilted mean by Langevin's function."""

    def __init__(
        self, dim: Any, half_width: Any = 1.0, *, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(dim, dtype, device)
        self.half_width = as_positive(half_width, "half_width")

    def _log_laplace_1d(self, x: Tensor) -> Tensor:
        return scaled_log(1.5, self.half_width, x[..., None])

    def _mean_1d(self, x: Tensor) -> Tensor:
        return scaled_mean(1.5, self.half_width, x[..., None])[..., 0]

    def _variance_1d(self, x: Tensor) -> Tensor:
        return spread(1.5, self.half_width, x.abs())[1]

    def _quantile_1d(self, u: Tensor) -> Tensor:
        return self.half_width * (2.0 * u - 1.0)

    def _extreme(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        return self.half_width * rows.sign()


class Laplace(Product):
    """Two-sided exponential coordinates of scale b: k(x) = -log(1 - b^2 x^2), finite only for |x| < 1/b."""

    def __init__(
        self, dim: Any, scale: Any = 1.0, *, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(dim, dtype, device)
        self.scale = as_positive(scale, "scale")

    def _check_domain(self, rows: Float64[Tensor, "m d"]) -> None:
        worst = float(rows.detach().abs().max()) if rows.numel() else 0.0
        if worst * self.scale >= 1.0:
            raise ValueError(
                f"theta: a Laplace law of scale {self.scale:g} has a limit only where every |theta_i| < {1 / self.scale:g}, "
                f"got {worst:g}; its transform is infinite there, so attention does not converge"
            )

    def _log_laplace_1d(self, x: Tensor) -> Tensor:
        a = self.scale * x
        # near the edge (1 - a)(1 + a) does not cancel; far from it log1p does not round at one
        return -torch.where(a.abs() > 0.5, torch.log((1.0 - a) * (1.0 + a)), torch.log1p(-a * a))

    def _mean_1d(self, x: Tensor) -> Tensor:
        a = self.scale * x
        return self.scale * (2.0 * a / ((1.0 - a) * (1.0 + a)))

    def _variance_1d(self, x: Tensor) -> Tensor:
        a = self.scale * x
        return self.scale * (self.scale * (2.0 * (1.0 + a * a) / ((1.0 - a) * (1.0 + a)) ** 2))

    def _quantile_1d(self, u: Tensor) -> Tensor:
        centred = u - 0.5
        # clamp: u = 0 has chance 2^-53 per draw and would give an infinite token
        return -self.scale * centred.sign() * torch.log1p((-2.0 * centred.abs()).clamp_min(-1.0 + 2.0**-53))
