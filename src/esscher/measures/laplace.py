"""Laplace coordinates: a limit only inside a strip."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from jaxtyping import Float64
from pydantic import PositiveFloat
from torch import Tensor

from esscher.inputs import as_positive
from esscher.measures import line
from esscher.measures.fields import Dim, LawFields
from esscher.measures.line import NEGLIGIBLE, Line, ladder, normalised, points
from esscher.measures.moments import power
from esscher.measures.product import Product

__all__ = ["Laplace", "LaplaceFields"]


class LaplaceFields(LawFields):
    law: Literal["laplace"]
    dim: Dim
    scale: PositiveFloat = 1.0

    def build(self, dtype: torch.dtype, device: str) -> Laplace:
        return Laplace(self.dim, self.scale, dtype=dtype, device=device)


class Laplace(Product):
    """Two-sided exponential coordinates of scale b: k(x) = -log(1 - b^2 x^2), finite only for |x| <
    1/b.
    """

    def __init__(
        self,
        dim: Any,
        scale: Any = 1.0,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(dim, dtype, device)
        self.scale = as_positive(scale, "scale")

    def _check_domain(self, rows: Float64[Tensor, "m d"]) -> None:
        worst = float(rows.detach().abs().max()) if rows.numel() else 0.0
        if worst * self.scale >= 1.0:
            raise ValueError(
                f"theta: a Laplace law of scale {self.scale:g} has a limit only where every"
                f" |theta_i| < {1 / self.scale:g}, got {worst:g}; its transform is infinite there,"
                " so attention does not converge"
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
        return (
            -self.scale
            * centred.sign()
            * torch.log1p((-2.0 * centred.abs()).clamp_min(-1.0 + 2.0**-53))
        )

    def _moment_1d(self, order: int) -> float:
        return math.factorial(order) * power(self.scale, order)

    def along(self, theta: Float64[Tensor, " d"]) -> list[Line] | None:
        """Token +-b e^z with weight exp(z - e^z) / 2: one dimension only, no spread."""
        if self.dim > 1:
            return None
        size = self.scale * abs(float(theta))
        top = math.log(2.5 * NEGLIGIBLE / (1.0 - size))
        z = ladder(
            -NEGLIGIBLE, top, min(0.1, line.STEP / (size * math.exp(top)) if size > 0 else 1.0)
        ).to(theta.device)
        z = torch.cat([z, z])
        sign = torch.ones_like(z)
        sign[: z.numel() // 2] = -1.0
        tokens = (sign * self.scale * torch.exp(z))[:, None]
        return [points(theta, tokens, normalised(z - torch.exp(z)))]
