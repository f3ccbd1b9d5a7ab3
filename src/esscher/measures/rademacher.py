"""Independent signs: tokens at the corners of a cube."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float64
from pydantic import PositiveFloat
from torch import Tensor

from esscher.inputs import as_positive
from esscher.measures.fields import Dim, LawFields
from esscher.measures.line import Line, points
from esscher.measures.moments import power
from esscher.measures.product import Product
from esscher.measures.radial import scaled_log, sech_squared

__all__ = ["Rademacher", "RademacherFields"]

CORNERS = 12  # up to this dimension the law along a tilt is listed corner by corner
FEW = 6  # and up to this one its corners are few


class RademacherFields(LawFields):
    law: Literal["rademacher"]
    dim: Dim
    scale: PositiveFloat = 1.0

    def build(self, dtype: torch.dtype, device: str) -> Rademacher:
        return Rademacher(self.dim, self.scale, dtype=dtype, device=device)


class Rademacher(Product):
    """Each coordinate is +scale or -scale with equal chance: k(x) = log cosh(scale x), tilted mean
    scale tanh.
    """

    is_entire: ClassVar[bool] = True

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

    def _log_laplace_1d(self, x: Tensor) -> Tensor:
        return scaled_log(0.5, self.scale, x[..., None])

    def _mean_1d(self, x: Tensor) -> Tensor:
        return self.scale * torch.tanh(self.scale * x)

    def _variance_1d(self, x: Tensor) -> Tensor:
        return sech_squared(self.scale, x.abs())

    def _quantile_1d(self, u: Tensor) -> Tensor:
        return self.scale * (2.0 * (u >= 0.5).to(u.dtype) - 1.0)

    def _moment_1d(self, order: int) -> float:
        return power(self.scale, order)

    def _sigma_1d(self) -> float:
        """cosh x <= exp(x^2/2)."""
        return self.scale

    def _edge_1d(self) -> float:
        return self.scale

    def along(self, theta: Float64[Tensor, " d"]) -> list[Line] | None:
        return None if self.dim > CORNERS else [points(theta, self._corners())]

    def points(self) -> Float64[Tensor, "N d"] | None:
        return None if self.dim > FEW else self._corners()

    def _corners(self) -> Float64[Tensor, "N d"]:
        ends = torch.tensor([-self.scale, self.scale], dtype=torch.float64, device=self.device)
        return torch.cartesian_prod(*self.dim * [ends]).reshape(-1, self.dim)
