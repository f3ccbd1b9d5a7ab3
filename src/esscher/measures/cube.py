"""The uniform law in a cube."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float64
from pydantic import PositiveFloat
from torch import Tensor

from esscher.inputs import as_positive
from esscher.measures.ball import Ball
from esscher.measures.fields import Dim, LawFields
from esscher.measures.line import Line
from esscher.measures.moments import power
from esscher.measures.product import Product
from esscher.measures.radial import scaled_log, scaled_mean, spread

__all__ = ["Cube", "CubeFields"]


class CubeFields(LawFields):
    size: ClassVar[str] = "half_width"

    law: Literal["cube"]
    dim: Dim
    half_width: PositiveFloat = 1.0

    def build(self, dtype: torch.dtype, device: str) -> Cube:
        return Cube(self.dim, self.half_width, dtype=dtype, device=device)


class Cube(Product):
    """Uniform on [-half_width, half_width]^dim: k(x) = log(sinh(ax) / (ax)), tilted mean by
    Langevin's function.
    """

    is_entire: ClassVar[bool] = True

    def __init__(
        self,
        dim: Any,
        half_width: Any = 1.0,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
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

    def _moment_1d(self, order: int) -> float:
        return power(self.half_width, order) / (order + 1)

    def _sigma_1d(self) -> float:
        """sinh(x)/x <= exp(x^2/6), since (2k+1)! >= 6^k k!."""
        return self.half_width / math.sqrt(3.0)

    def _edge_1d(self) -> float:
        return self.half_width

    def as_rotational(self) -> Ball | None:
        """An interval is a ball."""
        return (
            None if self.dim > 1 else Ball(1, self.half_width, dtype=self.dtype, device=self.device)
        )

    def along(self, theta: Float64[Tensor, " d"]) -> list[Line] | None:
        ball = self.as_rotational()
        return None if ball is None else ball.along(theta)
