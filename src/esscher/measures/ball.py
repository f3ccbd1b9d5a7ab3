"""The uniform law in a ball."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import scipy.special
import torch
from jaxtyping import Float64
from pydantic import PositiveFloat
from torch import Tensor

from esscher.measures.fields import Dim, LawFields
from esscher.measures.rotational import Rotational

__all__ = ["Ball", "BallFields"]

Floats = npt.NDArray[np.float64]


class BallFields(LawFields):
    size: ClassVar[str] = "radius"

    law: Literal["ball"]
    dim: Dim
    radius: PositiveFloat = 1.0

    def build(self, dtype: torch.dtype, device: str) -> Ball:
        return Ball(self.dim, self.radius, dtype=dtype, device=device)


class Ball(Rotational):
    """Uniform in the ball of the given radius in R^dim; Bessel order d/2 + 1."""

    @property
    def order(self) -> float:
        return self.dim / 2 + 1

    def _sample(self, n: int, generator: torch.Generator | None) -> Float64[Tensor, "n d"]:
        directions = self._directions(n, generator)
        share = torch.rand(n, 1, dtype=torch.float64, device=directions.device, generator=generator)
        return self.radius * share ** (1 / self.dim) * directions

    def quantile(self, chance: Floats) -> Floats:
        return np.asarray(self.radius * chance ** (1.0 / self.dim))

    def lengths(self, count: int) -> tuple[Floats, Floats]:
        """Gauss-Jacobi nodes for the density d r^(d-1) on [0, 1]."""
        nodes, weights = scipy.special.roots_jacobi(count, 0.0, self.dim - 1.0)
        return self.radius * 0.5 * (nodes + 1.0), weights / weights.sum()

    def _length_moment(self, order: int) -> float:
        return self.dim / (self.dim + order)
