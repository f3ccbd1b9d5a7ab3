"""Uniform B-splines: the weights that spread a key over a score grid, and the filter that lets a
kernel read them back.

With beta the B-spline of ``points`` taps (degree points - 1, support [0, points]), a smooth kernel
h is represented as

    h(u) ~ sum_k c_k beta(u / spacing - k),
    c = (prefilter) * (samples of h), so that both agree on the grid,

hence sum_j v_j h(u_j) ~ sum_k c_k D_k with the deposits D_k = sum_j v_j beta(u_j / spacing - k),
which do not know h. The error is about 2 (spacing / 2 pi)^points |h^(points)|, the classical order
of cardinal spline interpolation (Schoenberg, Cardinal Spline Interpolation, 1973; Unser, Splines: a
perfect fit, 1999). The weights are positive and sum to 1, so deposits of a measure are a measure.
Coarser grids nest in finer ones: deposits at twice the spacing are exact binomial sums of deposits
at the spacing.
"""

from __future__ import annotations

from functools import lru_cache
from math import comb, factorial, pi

import numpy as np
import numpy.typing as npt
import torch
from scipy.interpolate import BSpline, PPoly
from scipy.linalg import solveh_banded
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["coarsen", "exponential_gain", "interpolation_error", "prefilter", "weight_table"]

Floats = npt.NDArray[np.float64]


@lru_cache(maxsize=8)
def weight_table(points: int) -> Floats:
    """Polynomial coefficients of the taps: tap t of a key at the fraction r of its cell weighs
    sum_k table[t, k] r^k.

    That is beta(r + points - 1 - t): the pieces of beta from the last to the first.
    """
    beta = BSpline.basis_element(np.arange(points + 1.0))
    pieces = PPoly.from_spline(beta)
    first = int(np.flatnonzero(pieces.x == 0)[-1])  # scipy adds knots on either side
    return np.ascontiguousarray(pieces.c[::-1, first : first + points][:, ::-1].T)


@lru_cache(maxsize=32)
def prefilter(points: int, spacing: float) -> Floats:
    """The symmetric filter g with sum_m g_m (samples at k + m) = c_k: the inverse of beta sampled
    at the integers.

    Far from the ends of a long row it is what solves sum_i beta(points/2 + i) g_(m - i) = 1 at m =
    0 and 0 elsewhere. Cut where its terms, which fall as the largest pole of 1 / sum_i beta(1 + i)
    z^i inside the unit circle, are below 1e-17 of samples that grow as exp(2u), as the kernels do
    to the left of 0; the length is odd and the middle belongs to shift 0.
    """
    assert points % 2 == 0, "an even number of taps puts the centre of a spline on the grid"
    samples = weight_table(points)[: points - 1, 0]  # beta at 1 .. points - 1, symmetric
    poles = np.abs(np.roots(samples))
    decay = np.log(poles[poles < 1].max()) + 2 * spacing
    assert decay < 0, "so coarse a grid has no coefficients for exp(2u)"
    reach = int(np.ceil(np.log(1e-17) / decay))
    impulse = np.zeros(4 * reach + 1)
    impulse[2 * reach] = 1.0
    bands = np.repeat(samples[points // 2 - 1 :, None], impulse.size, axis=1)
    taps = solveh_banded(bands, impulse, lower=True)[reach : 3 * reach + 1]
    return np.asarray(taps / taps.sum())  # exact on constants, whatever the rounding


def exponential_gain(points: int, rate: float) -> float:
    """sum_m beta(points / 2 + m) exp(rate m): the coefficient of exp(rate x) is its sample over
    this, exactly.
    """
    samples = weight_table(points)[:, 0]
    shifts = np.arange(points) - (points // 2 - 1)
    return float(samples @ np.exp(rate * shifts))


def interpolation_error(points: int, spacing: float, strip: float) -> float:
    """2 (spacing / 2 pi)^points points! / strip^points: the error for a kernel analytic within |Im
    u| < strip.
    """
    return float(2 * (spacing / (2 * pi * strip)) ** points * factorial(points))


def coarsen(cells: Tensor, points: int) -> Tensor:
    """Deposits at twice the spacing, D'_K = 2^(1 - points) sum_k C(points, k) D_(2K + k).

    Exact: a B-spline at twice the spacing is this binomial sum of B-splines at the spacing. The
    last axis of ``cells`` ends on an even edge.
    """
    fine = cells.shape[-1]
    coarse = (fine + points + 1) // 2
    # cells of even and of odd number side by side, so that every term of the sum is a run of
    # neighbours
    padded = pad(cells, (2 * coarse - fine, points))
    even, odd = padded[..., ::2].contiguous(), padded[..., 1::2].contiguous()
    total = torch.zeros_like(even[..., :coarse])
    for k in range(points + 1):
        total.add_(
            (odd if k % 2 else even)[..., k // 2 : k // 2 + coarse],
            alpha=comb(points, k) * 2.0 ** (1 - points),
        )
    return total
