"""A law from outside the package, in one file: independent coordinates of density (a - |y|) / a^2
on [-a, a].
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

import esscher as es
from esscher.inputs import as_positive
from esscher.measures.fields import fields_of
from esscher.measures.line import Line, points
from esscher.measures.product import Product


class Triangular(Product):
    """A coordinate is the sum of two uniform ones on [-a/2, a/2]: k(x) = 2 log( sinh(ax/2) / (ax/2)
    ).
    """

    def __init__(
        self,
        dim: Any,
        half_width: Any = 1.0,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        es.Measure.__init__(self, dim, dtype, device)
        self._edge = self.half_width = as_positive(half_width, "half_width")
        self._half = es.Cube(1, 0.5 * self.half_width)

    def _log_laplace_1d(self, x: Tensor) -> Tensor:
        return 2.0 * self._half.log_laplace(x[..., None])

    def _mean_1d(self, x: Tensor) -> Tensor:
        return 2.0 * self._half.tilted_mean(x[..., None])[..., 0]

    def _variance_1d(self, x: Tensor) -> Tensor:
        return 2.0 * self._half.tilted_cov(x[..., None])[..., 0, 0]

    def _quantile_1d(self, u: Tensor) -> Tensor:
        tail = torch.minimum(u, 1.0 - u)
        return (u - 0.5).sign() * self.half_width * (1.0 - (2.0 * tail).sqrt())

    def _moment_1d(self, order: int) -> float:
        return 2.0 * self.half_width**order / ((order + 1) * (order + 2))

    @cached_property
    def subgaussian_root(self) -> Tensor:
        """sinh(x)/x <= exp(x^2/6), twice."""
        return self.half_width / math.sqrt(6.0) * torch.eye(self.dim, dtype=torch.float64)

    def along(self, theta: Float64[Tensor, " d"]) -> list[Line] | None:
        """On the line: Gauss-Legendre nodes on pieces of score length one, with a cut at 0 where
        the density has its edge.
        """
        if self.dim > 1:
            return None
        nodes, weights = np.polynomial.legendre.leggauss(24)
        pieces = math.ceil(self.half_width * abs(float(theta))) + 1
        starts = np.arange(-pieces, pieces)[:, None]
        y = torch.from_numpy((starts + 0.5 * (nodes + 1.0)) / pieces).flatten()
        mass = torch.from_numpy(np.tile(0.5 * weights / pieces, 2 * pieces)) * (1.0 - y.abs())
        return [points(theta, self.half_width * y[:, None], mass.log())]


TriangularFields = fields_of(Triangular, "half_width")
