"""Laws with independent coordinates, where everything happens one coordinate at a time: the cube,
independent signs, and Laplace tokens.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.measures import line
from esscher.measures.base import Measure, power
from esscher.measures.fields import fields_of
from esscher.measures.line import NEGLIGIBLE, Line, ladder, normalised, points
from esscher.measures.matrices import as_size, isotropic
from esscher.measures.pool import Pool
from esscher.measures.radial import scaled_log, scaled_mean, spread
from esscher.measures.rotational import Ball

CORNERS = 12  # up to this dimension the law of signs is a pool of its corners


class Product(Measure):
    """d independent copies of one symmetric law on the line: K(theta) = sum_i k(theta_i)."""

    _edge: float | None = None  # largest |y_i|, of a bounded law

    def __init__(self, dim: Any, scale: Any = 1.0, **place: Any) -> None:
        super().__init__(dim, **place)
        self.scale = as_size(scale, "scale")

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

    def _log_laplace(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, " m"]:
        return self._log_laplace_1d(rows).sum(-1)

    def _tilted_mean(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        return self._mean_1d(rows)

    def _tilted_cov(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d d"]:
        return torch.diag_embed(self._variance_1d(rows))

    def _sample(self, n: int, generator: torch.Generator | None) -> Float64[Tensor, "n d"]:
        return self._quantile_1d(self._noise(torch.rand, n, self.dim, generator))

    def _extreme(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        return super()._extreme(rows) if self._edge is None else self._edge * rows.sign()

    def support_radius(self) -> float | None:
        return None if self._edge is None else self._edge * math.sqrt(self.dim)

    def norm_moment(self, order: int, V: Float64[Tensor, "d_out d"] | None = None) -> float:
        """The d-th power of sum_r E y_i^2r t^r / r! (Miller's recurrence). With V: m_2^2
        ((tr G)^2 + 2 tr G^2) + (m_4 - 3 m_2^2) sum_i G_ii^2, G = V^T V.
        """
        m2, m4 = self._moment_1d(2), self._moment_1d(4)
        if V is None:
            d, last = self.dim, order // 2
            one = [self._moment_1d(2 * r) / math.factorial(r) for r in range(last + 1)]
            series = [1.0]
            for k in range(1, last + 1):
                terms = ((i * (d + 1) - k) * one[i] * series[k - i] for i in range(1, k + 1))
                series.append(sum(terms) / k)
            moment = math.factorial(last) * series[last]
        else:
            fourth = float((V.square().sum(0) ** 2).sum())
            moment = m2 * m2 * isotropic(V) + (m4 - 3.0 * m2 * m2) * fourth
        return math.inf if math.isnan(moment) else moment  # inf - inf: beyond float64


class _Bounded(Product):
    """Coordinates in [-a, a] whose transform is K_v(a x), see ``radial``."""

    is_entire: ClassVar[bool] = True
    order: ClassVar[float]  # v
    _edge: float

    def _log_laplace_1d(self, x: Tensor) -> Tensor:
        return scaled_log(self.order, self._edge, x[..., None])

    def _mean_1d(self, x: Tensor) -> Tensor:
        return scaled_mean(self.order, self._edge, x[..., None])[..., 0]

    def _variance_1d(self, x: Tensor) -> Tensor:
        return spread(self.order, self._edge, x.abs())[1]

    @cached_property
    def subgaussian_root(self) -> Float64[Tensor, "d d"]:
        """cosh x <= exp(x^2/2); sinh(x)/x <= exp(x^2/6), since (2k+1)! >= 6^k k!."""
        return self._times_identity(self._edge / math.sqrt(2.0 * self.order))


class Cube(_Bounded):
    """Uniform on [-half_width, half_width]^dim: k(x) = log(sinh(ax) / (ax)), tilted mean by
    Langevin's function.
    """

    order: ClassVar[float] = 1.5

    def __init__(self, dim: Any, half_width: Any = 1.0, **place: Any) -> None:
        Measure.__init__(self, dim, **place)
        self._edge = self.half_width = as_size(half_width, "half_width")

    def _quantile_1d(self, u: Tensor) -> Tensor:
        return self.half_width * (2.0 * u - 1.0)

    def _moment_1d(self, order: int) -> float:
        return power(self.half_width, order) / (order + 1)

    def along(self, theta: Float64[Tensor, " d"]) -> list[Line] | None:
        """An interval is a ball of one dimension."""
        ball = Ball(1, self.half_width, dtype=self.dtype, device=self.device)
        return None if self.dim > 1 else ball.along(theta)


class Rademacher(_Bounded):
    """Each coordinate is +scale or -scale with equal chance: k(x) = log cosh(scale x), tilted mean
    scale tanh.
    """

    order: ClassVar[float] = 0.5

    def __init__(self, dim: Any, scale: Any = 1.0, **place: Any) -> None:
        super().__init__(dim, scale, **place)
        self._edge = self.scale

    def _quantile_1d(self, u: Tensor) -> Tensor:
        return self.scale * (2.0 * (u >= 0.5).to(u.dtype) - 1.0)

    def _moment_1d(self, order: int) -> float:
        return power(self.scale, order)

    def as_pool(self) -> Pool | None:
        """Its corners, where they are few enough to list."""
        if self.dim > CORNERS:
            return None
        ends = torch.tensor([-self.scale, self.scale], dtype=torch.float64, device=self.device)
        return Pool(torch.cartesian_prod(*self.dim * [ends]).reshape(-1, self.dim))


CubeFields = fields_of(Cube, "half_width")
RademacherFields = fields_of(Rademacher)


class Laplace(Product):
    """Two-sided exponential coordinates of scale b: k(x) = -log(1 - b^2 x^2), finite only for |x| <
    1/b.
    """

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
        log_tail = torch.log1p((-2.0 * centred.abs()).clamp_min(-1.0 + 2.0**-53))
        return -self.scale * centred.sign() * log_tail

    def _moment_1d(self, order: int) -> float:
        return math.factorial(order) * power(self.scale, order)

    def along(self, theta: Float64[Tensor, " d"]) -> list[Line] | None:
        """Token +-b e^z with weight exp(z - e^z) / 2: one dimension only, no spread."""
        if self.dim > 1:
            return None
        size = self.scale * abs(float(theta))
        top = math.log(2.5 * NEGLIGIBLE / (1.0 - size))
        step = min(0.1, line.STEP / (size * math.exp(top)) if size > 0 else 1.0)
        z = ladder(-NEGLIGIBLE, top, step).to(theta.device)
        tokens = self.scale * torch.exp(z)
        log_weights = normalised((z - torch.exp(z)).repeat(2))
        return [points(theta, torch.cat([-tokens, tokens])[:, None], log_weights)]


LaplaceFields = fields_of(Laplace)
