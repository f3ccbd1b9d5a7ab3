"""Laws that every rotation turns into themselves: the sphere, the ball, and Student tokens."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import scipy.special
import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.inputs import as_positive
from esscher.measures import line
from esscher.measures.base import Measure, power
from esscher.measures.fields import fields_of
from esscher.measures.line import Line, check_nodes, edge, invert, ladder, normalised
from esscher.measures.matrices import as_size, isotropic, norms, units
from esscher.measures.radial import scaled_log, scaled_mean, spread

Floats = npt.NDArray[np.float64]


class Rotational(Measure):
    """A law that turns into itself under every rotation and whose transform is K_v(R |theta|), see
    ``radial``.

    With r = R |theta| and u = theta / |theta|: tilted mean R B_v(r) u, tilted covariance
    R^2 ( B_v(r)/r (I - u u^T) + B_v'(r) u u^T ).
    """

    is_entire: ClassVar[bool] = True
    filled: ClassVar[bool]  # uniform in the ball, not on the sphere

    def __init__(self, dim: Any, radius: Any = 1.0, **place: Any) -> None:
        super().__init__(dim, **place)
        self.radius = as_size(radius, "radius")

    @property
    def order(self) -> float:
        """Bessel order v."""
        return self.dim / 2 + self.filled

    def lengths(self, count: int) -> tuple[Floats, Floats]:
        """Nodes of |y| and their weights, exact for polynomials of degree 2 count - 1: Gauss-Jacobi
        nodes where the ball is filled.
        """
        if not self.filled:
            return np.array([self.radius]), np.ones(1)
        nodes, weights = scipy.special.roots_jacobi(count, 0.0, self.dim - 1.0)
        return self.radius * 0.5 * (nodes + 1.0), weights / weights.sum()

    def _log_laplace(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, " m"]:
        return scaled_log(self.order, self.radius, rows)

    def _tilted_mean(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        return scaled_mean(self.order, self.radius, rows)

    def _tilted_cov(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d d"]:
        of_across, of_along = spread(self.order, self.radius, norms(rows))
        u = units(rows)
        along = u[:, :, None] * u[:, None, :]
        across = torch.eye(self.dim, dtype=torch.float64, device=rows.device) - along
        return of_across[:, None, None] * across + of_along[:, None, None] * along

    def _extreme(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        return self.radius * units(rows)

    def _sample(self, n: int, generator: torch.Generator | None) -> Float64[Tensor, "n d"]:
        noise = self._noise(torch.randn, n, self.dim, generator)
        directions = torch.nn.functional.normalize(noise, eps=1e-300)
        if not self.filled:
            return self.radius * directions
        share = self._noise(torch.rand, n, 1, generator)
        return self.radius * share ** (1 / self.dim) * directions

    def along(self, theta: Float64[Tensor, " d"]) -> list[Line]:
        """Token R (x u + sqrt(1 - x^2) w): x the cosine, w uniform across u."""
        size = float(theta.norm())
        eye = torch.eye(self.dim, dtype=theta.dtype, device=theta.device)
        u = theta / size if size > 0 else eye[0]
        r, R = self.radius * size, self.radius
        x, log_weights, spread = self.cosine(r)
        across = eye - torch.outer(u, u)
        return [Line(r * x, log_weights, R * x[:, None] * u, R**2 * spread, across)]

    def cosine(self, r: float) -> tuple[Tensor, Tensor, Tensor]:
        """Nodes of the cosine x = <y, u> / R for tilts up to r = R |theta|: x, log-weights,
        variance of a coordinate across u.

        x has density (1 - x^2)^((p-3)/2), p = 2v: d on the sphere and d + 2 in the ball. With x =
        tanh y the weight is sech(y)^(p-1), smooth on the whole line; given x each coordinate across
        has variance (1 - x^2) / (p - 1).
        """
        p = round(2 * self.order)
        if p == 1:  # two points
            ends = torch.tensor([-1.0, 1.0], dtype=torch.float64, device=self.device)
            return ends, torch.full_like(ends, -math.log(2.0)), torch.zeros_like(ends)
        # at least so many; beyond them the edge is lost in the rounding of r
        check_nodes(r / line.STEP)
        # the weight tilts by up to exp(2 score)
        end = edge(lambda y: (p - 1) * _log_sech(y) + 2 * r * math.tanh(y))
        start = edge(lambda y: (p - 1) * _log_sech(y))
        # z = y / h + r tanh(y) / STEP: unit steps in z are at most h in y and at most STEP in the
        # score
        h = min(0.2, 0.5 / math.sqrt(p))
        first, last = (y / h + r * math.tanh(y) / line.STEP for y in (-start, end))
        z = ladder(first, last, 1.0).to(self.device)
        y = invert(lambda y: y / h + r * torch.tanh(y) / line.STEP, z, -start - 1.0, end + 1.0)
        sech2 = 1.0 / torch.cosh(y) ** 2
        log_density = -(p - 1) * (y.abs() + torch.log1p(torch.exp(-2 * y.abs())))
        log_weights = normalised(log_density - torch.log(1.0 / h + r * sech2 / line.STEP))
        return torch.tanh(y), log_weights, sech2 / (p - 1)

    @cached_property
    def subgaussian_root(self) -> Float64[Tensor, "d d"]:
        """S = R^2 / (2v) I: the even moments of <u, y>, R^{2k} (2k-1)!! / (d (d+2) .. (d+2k-2)) on
        the sphere, are at most those of N(0, R^2 / (2v)).
        """
        return self._times_identity(self.radius / math.sqrt(2 * self.order))

    def support_radius(self) -> float:
        return self.radius

    def norm_moment(self, order: int, V: Float64[Tensor, "d_out d"] | None = None) -> float:
        """E|y|^order; with V: E|y|^4 ((tr G)^2 + 2 tr G^2) / (d (d+2)), G = V^T V."""
        share = self.dim / (self.dim + order) if self.filled else 1.0
        moment = power(self.radius, order) * share
        return moment if V is None else moment * isotropic(V) / (self.dim * (self.dim + 2))


def _log_sech(y: float) -> float:
    return math.log(2.0) - abs(y) - math.log1p(math.exp(-2 * abs(y)))


class Sphere(Rotational):
    """Uniform on the sphere of the given radius in R^dim; Bessel order d/2."""

    filled = False


class Ball(Rotational):
    """Uniform in the ball of the given radius in R^dim; Bessel order d/2 + 1."""

    filled = True


SphereFields = fields_of(Sphere, "radius")
BallFields = fields_of(Ball, "radius")


class Student(Measure):
    """Multivariate Student tokens y = scale z sqrt(df / chi^2_df), z ~ N(0, I), with df degrees of
    freedom.

    E exp<theta, y> is infinite for every theta except 0, so softmax attention has no limit: its
    weight goes to the largest token. Samples can be drawn; the mean exists for df > 1, the
    covariance scale^2 df / (df - 2) I for df > 2.
    """

    remedy: ClassVar[str] = "its tails are too heavy at every scale: take another law"

    def __init__(self, dim: Any, df: Any, scale: Any = 1.0, **place: Any) -> None:
        super().__init__(dim, **place)
        self.df = as_positive(df, "df")
        self.scale = as_size(scale, "scale")

    def _log_laplace(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, " m"]:
        return torch.where((rows != 0.0).any(-1), torch.inf, rows.new_zeros(rows.shape[0]))

    def _tilted_mean(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        if self.df <= 1.0:
            raise ValueError(f"mean: a Student law has one for df > 1, got df = {self.df:g}")
        return torch.zeros_like(rows)

    def _tilted_cov(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d d"]:
        if self.df <= 2.0:
            raise ValueError(
                f"cov: a Student law has a finite one for df > 2, got df = {self.df:g}"
            )
        variance = self.scale * (self.scale * (self.df / (self.df - 2.0)))
        return self._times_identity(variance).expand(rows.shape[0], -1, -1)

    def _sample(self, n: int, generator: torch.Generator | None) -> Float64[Tensor, "n d"]:
        noise = self._noise(torch.randn, n, self.dim, generator)
        # clamp: chance = 0 comes once in 2^53 draws and would give an infinite token
        chance = self._noise(torch.rand, n, 1, generator).clamp_min(2.0**-54)
        quantile = scipy.special.gammaincinv(0.5 * self.df, chance.cpu().numpy())
        chi2 = 2.0 * torch.from_numpy(quantile).clamp_min(1e-300).to(noise)
        return self.scale * noise * torch.sqrt(self.df / chi2)


StudentFields = fields_of(Student)
