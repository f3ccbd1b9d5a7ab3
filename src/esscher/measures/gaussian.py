"""Gaussian tokens: the one law whose attention limit is affine in the query."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float64
from pydantic import Field, PositiveFloat, model_validator
from torch import Tensor

from esscher.inputs import as_tensor
from esscher.measures import line
from esscher.measures.base import Measure
from esscher.measures.fields import Dim, LawFields
from esscher.measures.line import Line, ladder, normalised
from esscher.measures.matrices import check_covariance, in_range, product


class Gaussian(Measure):
    """N(m, Sigma), Sigma possibly singular.

    K(theta) = <m, theta> + theta^T Sigma theta / 2;  tilted mean m + Sigma theta;  tilted
    covariance Sigma.
    """

    is_gaussian: ClassVar[bool] = True
    is_entire: ClassVar[bool] = True

    def __init__(self, cov: Any, mean: Any = None) -> None:
        cov = in_range(as_tensor(cov, "cov", ndim=2), "cov")
        super().__init__(cov.shape[0], cov.dtype, cov.device)
        self._cov, self.root = check_covariance(cov, "cov")
        self._mean = self._zero
        if mean is not None:
            mean = in_range(as_tensor(mean, "mean", ndim=1, last=self.dim), "mean")
            self._mean = mean.to(self._cov)

    def __repr__(self) -> str:
        shifted = f", |mean|={float(self._mean.norm()):.4g}" if bool(self._mean.any()) else ""
        return f"Gaussian(dim={self.dim}, tr cov={float(self._cov.trace()):.4g}{shifted})"

    def _log_laplace(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, " m"]:
        return rows @ self._mean + 0.5 * ((rows @ self._cov) * rows).sum(-1)

    def _tilted_mean(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        return self._mean + rows @ self._cov

    def _tilted_cov(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d d"]:
        return self._cov.expand(rows.shape[0], -1, -1)

    def _sample(self, n: int, generator: torch.Generator | None) -> Float64[Tensor, "n d"]:
        return self._mean + self._noise(torch.randn, n, self.dim, generator) @ self.root.T

    def along(self, theta: Float64[Tensor, " d"]) -> list[Line]:
        """Score m.theta + s g, token m + L u g with covariance L (I - u u^T) L^T; L = root, u = L^T
        theta / s, s its length.

        Whatever unit vector u is, these are two parts of the same Gaussian: rounding of u costs
        nothing where s nearly vanishes. Where it does vanish, u = 0.
        """
        mean, u = self.mean.double(), self.root.T @ theta
        s, centre = float(u.norm()), float(theta @ mean)
        step = min(0.25, line.STEP / s) if s > 0.0 else 0.25  # in g: at most STEP in the score
        if s == 0.0:
            g = theta.new_zeros(1)
        else:  # weights tilt by up to exp(2 score), which moves the bell to g = 2s
            g = ladder(-10.0, 2 * s + 10.0, step).to(theta.device)
        u = u / s if s > 0.0 else u
        across = self.root @ u
        return [
            Line(
                centre + s * g,
                normalised(-0.5 * g * g),
                mean + g[:, None] * across,
                torch.ones_like(g),
                self.root - torch.outer(across, u),
            )
        ]

    @cached_property
    def subgaussian_root(self) -> Float64[Tensor, "d d"]:
        """Equality with S = Sigma."""
        return self.root

    def norm_moment(self, order: int, V: Float64[Tensor, "d_out d"] | None = None) -> float:
        """E exp(t |V (y - m)|^2) = det(1 - 2t C)^(-1/2), C = V Sigma V^T: with traces tr C^r its
        series has k h_k = sum_r tr C^r h_(k-r) / 2 in 2t.
        """
        root = self.root if V is None else product(V, self.root)
        cov, traces, series = product(root, root.T), [], [1.0]
        power = cov
        for k in range(1, order // 2 + 1):
            traces.append(float(power.trace()))
            series.append(sum(traces[r] * series[k - 1 - r] for r in range(k)) / (2 * k))
            power = product(power, cov)
        return 2.0 ** (order // 2) * math.factorial(order // 2) * series[-1]


class GaussianFields(LawFields):
    """N(mean, Sigma): eigenvalues of Sigma fall like variance * i^-decay."""

    size: ClassVar[str] = "variance"

    law: Literal["gaussian"]
    dim: Dim
    variance: PositiveFloat = 1.0
    decay: float = Field(0.0, ge=0.0)
    mean: float | tuple[float, ...] = 0.0

    @model_validator(mode="after")
    def _one_each(self) -> GaussianFields:
        if isinstance(self.mean, tuple) and len(self.mean) != self.dim:
            raise ValueError(f"mean: expected {self.dim} numbers, got {len(self.mean)}")
        return self

    def build(self, dtype: torch.dtype, device: str) -> Gaussian:
        values = self.variance * torch.arange(1, self.dim + 1, dtype=torch.float64) ** -self.decay
        mean = self.mean if isinstance(self.mean, tuple) else (self.mean,) * self.dim
        return Gaussian(torch.diag(values).to(device, dtype), list(mean))
