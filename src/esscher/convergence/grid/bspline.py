"""Uniform B-splines: the weights that spread a key over a score grid, and the filter that lets a kernel read them back.

With beta the B-spline of ``points`` taps (degree points - 1, support [0, points]), a smooth kernel h is represented as

    h(u) ~ sum_k c_k beta(u / spacing - k),      c = (prefilter) * (samples of h), so that both agree on the grid,

hence sum_j v_j h(u_j) ~ sum_k c_k D_k with the deposits D_k = sum_j v_j beta(u_j / spacing - k), which do not know h.
The error is about 2 (spacing / 2 pi)^points |h^(points)|, the classical order of cardinal spline interpolation
(Schoenberg, Cardinal Spline Interpolation, 1973; Unser, Splines: a perfect fit, 1999). The weights are positive and sum
to 1, so deposits of a measure are a measure. Coarser grids nest in finer ones: deposits at twice the spacing are exact
binomial sums of deposits at the spacing.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from math import comb, factorial, pi

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["coarsen", "exponential_gain", "interpolation_error", "prefilter", "weight_table"]

Floats = npt.NDArray[np.float64]


@lru_cache(maxsize=8)
def weight_table(points: int) -> Floats:
    """Polynomial coefficients of the taps: tap t of a key at the fraction r of its cell weighs sum_k table[t, k] r^k.

    That is beta(r + points - 1 - t), with beta(x) = sum_k (-1)^k C(points, k) (x - k)_+^(points-1) / (points-1)!.
    """
    degree = points - 1
    table = np.zeros((points, points))
    for tap in range(points):
        segment = degree - tap
        for power in range(points):
            total = Fraction(0)
            for k in range(segment + 1):
                total += (-1) ** k * comb(points, k) * comb(degree, power) * Fraction(segment - k) ** (degree - power)
            table[tap, power] = float(total / factorial(degree))
    return table


@lru_cache(maxsize=32)
def prefilter(points: int, spacing: float) -> Floats:
    """The symmetric filter g with sum_m g_m (samples at k + m) = c_k: the inverse of beta sampled at the integers.

    g_m = sum over the poles |z| < 1 of z^(|m| + h - 1) / Q'(z), Q(z) = sum_i beta(1 + i) z^i, h = points / 2 - 1.
    Cut where its terms fall below 1e-17 of samples that grow as exp(2u), as the kernels do to the left of 0; the length
    is odd and the middle belongs to shift 0.
    """
    assert points % 2 == 0, "an even number of taps puts the centre of a spline on the grid"
    polynomial = np.polynomial.Polynomial(weight_table(points)[: points - 1, 0])  # beta at 1 .. points - 1, symmetric
    poles = np.real(polynomial.roots())
    poles = poles[np.abs(poles) < 1]
    decay = np.log(np.abs(poles).max()) + 2 * spacing
    assert decay < 0, "so coarse a grid has no coefficients for exp(2u)"
    reach = int(np.ceil(np.log(1e-17) / decay))
    shifts = np.abs(np.arange(-reach, reach + 1))
    residues = poles ** (points // 2 - 2) / polynomial.deriv()(poles)
    taps = (residues[:, None] * poles[:, None] ** shifts).sum(axis=0)
    normalised: Floats = taps / taps.sum()
    return normalised  # exact on constants, whatever the rounding of the poles


def exponential_gain(points: int, rate: float) -> float:
    """sum_m beta(points / 2 + m) exp(rate m): the coefficient of exp(rate x) is its sample over this, exactly."""
    samples = weight_table(points)[:, 0]
    shifts = np.arange(points) - (points // 2 - 1)
    return float(samples @ np.exp(rate * shifts))


def interpolation_error(points: int, spacing: float, strip: float) -> float:
    """2 (spacing / 2 pi)^points points! / strip^points: the error for a kernel analytic within |Im u| < strip."""
    return float(2 * (spacing / (2 * pi * strip)) ** points * factorial(points))


def coarsen(cells: Tensor, points: int) -> Tensor:
    """Deposits at twice the spacing, D'_K = 2^(1 - points) sum_k C(points, k) D_(2K + k).

    Exact: a B-spline at twice the spacing is this binomial sum of B-splines at the spacing. The last axis of ``cells``
    ends on an even edge.
    """
    fine = cells.shape[-1]
    coarse = (fine + points + 1) // 2
    sums = torch.zeros(fine, coarse, dtype=torch.float64)
    for k in range(points + 1):
        into = torch.arange(coarse)
        take = fine - 2 * (coarse - into) + k  # cell 2K + k, counted from the common end
        inside = (take >= 0) & (take < fine)
        sums[take[inside], into[inside]] = comb(points, k) * 2.0 ** (1 - points)
    return cells @ sums.to(cells.device)
