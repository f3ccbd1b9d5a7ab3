"""Laws that every rotation turns into themselves."""

from __future__ import annotations

import math
from abc import abstractmethod
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
from esscher.measures.base import Measure, noise_device
from esscher.measures.line import Line, check_nodes, edge, invert, ladder, normalised
from esscher.measures.moments import power
from esscher.measures.panels import panels
from esscher.measures.radial import scaled_log, scaled_mean, spread
from esscher.measures.spectrum import product
from esscher.measures.wide import norms, units

__all__ = ["Rotational"]

Floats = npt.NDArray[np.float64]


class Rotational(Measure):
    """A law that turns into itself under every rotation and whose transform is K_v(R |theta|), see
    ``radial``.

    With r = R |theta| and u = theta / |theta|: tilted mean R B_v(r) u, tilted covariance
    R^2 ( B_v(r)/r (I - u u^T) + B_v'(r) u u^T ).
    """

    is_entire: ClassVar[bool] = True

    def __init__(
        self,
        dim: Any,
        radius: Any = 1.0,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(dim, dtype, device)
        self.radius = as_positive(radius, "radius")

    @property
    @abstractmethod
    def order(self) -> float:
        """Bessel order v."""

    @abstractmethod
    def quantile(self, chance: Floats) -> Floats:
        """The length |y| whose distribution function is ``chance``."""

    @abstractmethod
    def lengths(self, count: int) -> tuple[Floats, Floats]:
        """Nodes of |y| and their weights, which sum to one: exact for polynomials of degree 2 count
        - 1, or fewer nodes.
        """

    @abstractmethod
    def _length_moment(self, order: int) -> float:
        """E|y|^order / R^order."""

    def _log_laplace(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, " m"]:
        return scaled_log(self.order, self.radius, rows)

    def _tilted_mean(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        return scaled_mean(self.order, self.radius, rows)

    def _tilted_cov(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d d"]:
        of_across, of_along = spread(self.order, self.radius, norms(rows))
        along = torch.einsum("mi,mj->mij", *(2 * [units(rows)]))
        across = torch.eye(self.dim, dtype=torch.float64, device=rows.device) - along
        return of_across[:, None, None] * across + of_along[:, None, None] * along

    def _extreme(self, rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "m d"]:
        return self.radius * units(rows)

    def _directions(self, n: int, generator: torch.Generator | None) -> Float64[Tensor, "n d"]:
        device = noise_device(generator, self.device)
        noise = torch.randn(n, self.dim, dtype=torch.float64, device=device, generator=generator)
        return torch.nn.functional.normalize(noise, eps=1e-300)

    @property
    def is_even(self) -> bool:
        return True

    def as_rotational(self) -> Rotational:
        return self

    def along(self, theta: Float64[Tensor, " d"]) -> list[Line]:
        """Token R (x u + sqrt(1 - x^2) w): x the cosine, w uniform across u."""
        return self._lines(theta, None)

    def pieces(self, theta: Float64[Tensor, " d"], cut: float) -> list[Line]:
        """Panels of the cosine that end where the score is ``cut``."""
        return self._lines(theta, cut)

    def score_tail(self, theta: Float64[Tensor, " d"], cut: float) -> float:
        """P(x > cut / r) = I(1 - x^2; (p - 1)/2, 1/2) / 2 for x >= 0, I the regularised incomplete
        beta function.
        """
        r, p = self.radius * float(theta.norm()), round(2 * self.order)
        if abs(cut) >= r or p == 1:
            return float(cut < 0.0) if abs(cut) >= r else 0.5
        tail = 0.5 * float(
            scipy.special.betainc(0.5 * (p - 1), 0.5, (1.0 - cut / r) * (1.0 + cut / r))
        )
        return tail if cut >= 0 else 1.0 - tail

    def _lines(self, theta: Tensor, cut: float | None) -> list[Line]:
        size = float(theta.norm())
        eye = torch.eye(self.dim, dtype=theta.dtype, device=theta.device)
        u = theta / size if size > 0 else eye[0]
        r = self.radius * size
        x, log_weights, spread = self.cosine(r, cut)
        across = eye - torch.outer(u, u)
        return [
            Line(r * x, log_weights, self.radius * x[:, None] * u, self.radius**2 * spread, across)
        ]

    def cosine(self, r: float, cut: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Nodes of the cosine x = <y, u> / R for tilts up to r = R |theta|: x, log-weights,
        variance of a coordinate across u.

        x has density (1 - x^2)^((p-3)/2), p = 2v: d on the sphere and d + 2 in the ball. With x =
        tanh y the weight is sech(y)^(p-1), smooth on the whole line; given x each coordinate across
        has variance (1 - x^2) / (p - 1). With a ``cut`` the nodes are those of panels that end at
        the score r x = cut.
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
        if cut is None:
            z = ladder(first, last, 1.0).to(self.device)
            lengths = torch.ones_like(z)
        else:
            place = (
                math.atanh(cut / r) / h + cut / line.STEP
                if abs(cut) < r
                else math.copysign(math.inf, cut)
            )
            z, lengths = (nodes.to(self.device) for nodes in panels(first, last, place))
        y = invert(lambda y: y / h + r * torch.tanh(y) / line.STEP, z, -start - 1.0, end + 1.0)
        sech2 = 1.0 / torch.cosh(y) ** 2
        log_density = -(p - 1) * (y.abs() + torch.log1p(torch.exp(-2 * y.abs())))
        log_weights = normalised(
            lengths.log() + log_density - torch.log(1.0 / h + r * sech2 / line.STEP)
        )
        return torch.tanh(y), log_weights, sech2 / (p - 1)

    @cached_property
    def subgaussian_roots(self) -> list[Float64[Tensor, "d d"]]:
        """S = R^2 / (2v) I: the even moments of <u, y> are at most those of N(0, R^2 / (2v)).

        Sphere: E <u, y>^{2k} = R^{2k} (2k-1)!! / (d (d+2) .. (d+2k-2)); ball: one factor d/(d+2k)
        more.
        """
        sigma = self.radius / math.sqrt(2 * self.order)
        return [sigma * torch.eye(self.dim, dtype=torch.float64, device=self.device)]

    def support_radius(self) -> float:
        return self.radius

    def _norm_moment(self, order: int) -> float:
        return power(self.radius, order) * self._length_moment(order)

    def _value_fourth_moment(self, V: Float64[Tensor, "d_out d"]) -> float:
        """E|y|^4 ((tr G)^2 + 2 tr G^2) / (d (d+2)), G = V^T V."""
        G = product(V.T, V)
        isotropic = float(G.trace() ** 2 + 2.0 * (G * G).sum())
        return self._norm_moment(4) * isotropic / (self.dim * (self.dim + 2))


def _log_sech(y: float) -> float:
    return math.log(2.0) - abs(y) - math.log1p(math.exp(-2 * abs(y)))
