"""The law over Gaussian queries of what the error at a query depends on: the score's deviation s
and a^T G a.

For Gaussian tokens N(m, Sigma), Sigma = L L^T, and Gaussian queries the score's vector a = L^T
theta(x) is Gaussian, and with G = L^T V^T V L the error at a query is f1(n, s) a^T G a / s^2 +
f2(n, s) (tr G - a^T G a / s^2), s = |a|. In the basis where cov(a) is diagonal, a_k has variance
lambda_k and mean b_k, and with q_k = 1 + 2 p lambda_k

    E exp(-p s^2)            = D(p) = prod_k q_k^{-1/2} exp(-p b_k^2 / q_k)
    E exp(-p s^2) a^T G a
    = D(p) ( sum_k G_kk lambda_k / q_k + sum_kl G_kl b_k b_l / (q_k q_l) ) .

Where all b_k = 0 the first is inverted for each s on the parabola p = p_0 + mu (1 + iu)^2, p_0 the
rightmost singularity -1/(2 max lambda) and mu such that the parabola crosses the axis at the saddle
point, where D(p) e^{pt} is least. There the integrand is real and falls off on both sides, so a
trapezoid rule in u is right to rounding relative to the density itself, in its tails too: at large
n the rare queries far out carry the mean. With means the transform has essential singularities that
no such contour avoids: ``shifted`` has that law without a density.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from esscher.attention.head import Head
from esscher.measures.base import Measure
from esscher.measures.matrices import is_diagonal, product

__all__ = ["ScoreLaw", "score_law"]

LARGEST = 1e90  # its cube, which the contour takes, is a number still

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ScoreLaw:
    """The law of s^2 = |a|^2, a Gaussian, and of a^T G a beside it; equal variances are one group.

    ``values``: the groups' lambda > 0; ``counts``: how many; ``shifts``: sum b_k^2; ``traces``: sum
    G_kk lambda_k; ``cross``: sum G_kl b_k b_l between groups, the last row and column for the
    directions of variance 0, whose sum b_k^2 is ``floor``.
    """

    values: Floats
    counts: Floats
    shifts: Floats
    traces: Floats
    cross: Floats
    floor: float

    @property
    def mean(self) -> float:
        """E s^2 - floor."""
        return float(self.counts @ self.values + self.shifts.sum())

    @property
    def deviation(self) -> float:
        """Standard deviation of s^2."""
        return math.sqrt(
            float(2.0 * self.counts @ self.values**2 + 4.0 * self.shifts @ self.values)
        )

    def growth(self, power: float) -> tuple[float, float]:
        """E exp(power s^2) and E exp(power s^2) a^T G a; infinite where they are."""
        q = 1.0 - 2.0 * power * self.values
        if (q <= 0.0).any():
            return math.inf, math.inf
        log = power * self.floor + float(
            (-0.5 * self.counts * np.log(q) + power * self.shifts / q).sum()
        )
        size = math.exp(log) if log < 700.0 else math.inf
        return size, size * float(self._form(1.0 / q))

    def densities(self, t: Floats) -> tuple[Floats, Floats, Floats]:
        """Logarithms of a scale, and over it the density of s^2 - floor at t and that density times
        E[a^T G a | t]; no b_k but of variance 0.
        """
        assert not self.shifts.any()
        top = self.values.max()
        gap = 1.0 - self.values / top
        mu = self._saddle(t, gap)
        q = gap + 2.0 * mu[:, None] * self.values
        p = mu - 0.5 / top
        log_scale = p * t - 0.5 * np.log(q) @ self.counts
        curvature = 2.0 * (self.values / q) ** 2 @ self.counts
        step = np.minimum(0.1, 0.5 / np.sqrt(4.0 * mu**2 * curvature))
        points = int(np.ceil((np.sqrt(46.0 / (mu * t)) / step).max())) + 1
        one, form = np.zeros_like(t), np.zeros_like(t)
        for k in range(points):
            turn = 1.0 + 1j * k * step
            at = mu * turn**2
            z = gap + 2.0 * at[:, None] * self.values
            log = (at - 0.5 / top) * t - 0.5 * np.log(z) @ self.counts
            share = (
                (0.5 if k == 0 else 1.0) * step * 2.0 * mu / np.pi * turn * np.exp(log - log_scale)
            )
            one += share.real
            form += (share * self._form(1.0 / z)).real
        return log_scale, one, form

    def _form(self, r: Any) -> Any:
        """sum G_kk lambda_k r_k + sum G_kl b_k b_l r_k r_l."""
        linear = r @ self.traces
        if not self.cross.any():
            return linear
        full = np.concatenate([r, np.ones((*r.shape[:-1], 1))], axis=-1)
        return linear + ((full @ self.cross) * full).sum(axis=-1)

    def _saddle(self, t: Floats, gap: Floats) -> Floats:
        """mu > 0 with sum_k lambda_k / q_k = t, by bisection of its logarithm: a few digits
        suffice.
        """
        low, high = np.log(0.25 / t), np.log(2.0 * float(self.counts.sum()) / t + 1e-300)
        for _ in range(40):
            middle = 0.5 * (low + high)
            q = gap + 2.0 * np.exp(middle)[:, None] * self.values
            above = self.values / q @ self.counts > t
            low, high = np.where(above, middle, low), np.where(above, high, middle)
        return np.asarray(np.exp(0.5 * (low + high)), np.float64)


def score_law(head: Head, measure: Measure, queries: Measure) -> tuple[ScoreLaw, float, bool]:
    """The law of the score's vector, tr G, and whether G is a multiple of the identity."""
    root, A = measure.root, head.A.double()
    bias = torch.zeros_like(A[:, 0]) if head.tilt_bias is None else head.tilt_bias.double()
    spread = product(product(root.T, A), queries.root)
    offset = root.T @ (A @ queries.mean.double() + bias.to(A))
    value = product(head.V.double(), root)
    if is_diagonal(spread):
        values = spread.diagonal() ** 2
    else:
        values, basis = torch.linalg.eigh(product(spread, spread.T))
        values, offset, value = values.clamp_min(0.0), basis.T @ offset, value @ basis
    size = (value * value).sum(dim=0)
    largest = max(float(numbers.max()) for numbers in (values, offset * offset, size))
    if not largest < LARGEST:
        raise ValueError(
            f"head and measure: expected squared scores and values below {LARGEST:g}, got"
            f" {largest:.3g}; give scales and horizons nearer to 1"
        )
    gram = product(value.T, value)
    even = size.mean() * torch.eye(size.numel(), dtype=torch.float64, device=size.device)
    alike = float((gram - even).abs().max()) <= 1e-12 * float(size.mean())
    law = _grouped(
        values.cpu().numpy(), offset.cpu().numpy(), value.cpu().numpy(), size.cpu().numpy()
    )
    return law, float(size.sum()), alike


def _grouped(values: Floats, offset: Floats, value: Floats, size: Floats) -> ScoreLaw:
    values = np.where(values > 1e-14 * values.max(initial=0.0), values, 0.0)
    offset = np.where(offset**2 > 1e-32 * values, offset, 0.0)  # below is rounding
    levels, group = np.unique(values, return_inverse=True)
    if levels[0] > 0.0:
        levels, group = np.append(0.0, levels), group + 1
    # groups 1 .. last - 1 have variance; group 0, which has none, becomes the last
    last = levels.size
    sums = [
        np.bincount(group, weights, last).astype(np.float64)
        for weights in (np.ones_like(values), offset**2, size * values)
    ]
    cross = np.zeros((last, last))
    if offset.any():
        means = np.zeros((value.shape[0], last))
        np.add.at(means.T, group, (value * offset).T)
        means = np.roll(means, -1, axis=1)
        cross = means.T @ means
    counts, shifts, traces = (total[1:] for total in sums)
    return ScoreLaw(levels[1:], counts, shifts, traces, cross, float(sums[1][0]))
