"""The uniform law on a sphere."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float64
from pydantic import PositiveFloat
from torch import Tensor

from esscher.measures.fields import Dim, LawFields
from esscher.measures.rotational import Rotational

__all__ = ["Sphere", "SphereFields"]

Floats = npt.NDArray[np.float64]


class SphereFields(LawFields):
    size: ClassVar[str] = "radius"

    law: Literal["sphere"]
    dim: Dim
    radius: PositiveFloat = 1.0

    def build(self, dtype: torch.dtype, device: str) -> Sphere:
        return Sphere(self.dim, self.radius, dtype=dtype, device=device)


class Sphere(Rotational):
    """Uniform on the sphere of the given radius in R^dim; Bessel order d/2."""

    @property
    def order(self) -> float:
        return self.dim / 2

    def _sample(self, n: int, generator: torch.Generator | None) -> Float64[Tensor, "n d"]:
        return self.radius * self._directions(n, generator)

    def quantile(self, chance: Floats) -> Floats:
        return np.full_like(chance, self.radius)

    def lengths(self, count: int) -> tuple[Floats, Floats]:
        return np.array([self.radius]), np.ones(1)

    def _length_moment(self, order: int) -> float:
        return 1.0
