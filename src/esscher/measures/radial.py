"""The three radial functions of rotation-invariant laws, stable for every order and radius.

For v > 0 and r >= 0, with rho = r^2,

    K_v(r) = log 0F1(; v; r^2 / 4),
    B_v(r) = K_v'(r) = I_v(r) / I_{v-1}(r),
    q_v = B_v(r) / r.

The uniform law on the sphere of radius R in R^d has log-Laplace transform K_{d/2}(R |theta|), the
ball K_{d/2+1}(R |theta|); v = 1/2 is log cosh (Rademacher), v = 3/2 is log(sinh r / r) (uniform on
an interval). Orders above ``FLOOR`` use Debye's uniform expansion (DLMF 10.41), rearranged so that
no two large numbers are subtracted, and lower orders are reached by

    q_v = 1 / (2v + rho q_{v+1}),
    K_v = K_{v+1} + log1p(rho q_{v+1} / 2v),
    B_v' = q_v^2 (2v - rho B_{v+1}'),

whose terms are positive: r from 0 to 1e150 and v from 1/2 to 4096 keep about 14 digits, the
curvature 12.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.polynomial import Polynomial
from torch import Tensor

from esscher.measures.matrices import norms

FLOOR = 30.0  # smallest Debye order; with TERMS = 10 the truncation error is below 1e-15
TERMS = 10


class Radial(NamedTuple):
    """K_v, q_v = B_v / r and the derivative B_v' in r."""

    log: Tensor
    ratio: Tensor
    curvature: Tensor


def radial(order: float, rho: Tensor) -> Radial:
    """All radial functions at squared radius ``rho`` (float64)."""
    steps = max(0, math.ceil(FLOOR - (order - 1.0)))
    value = _debye(order - 1.0 + steps, rho)
    for v in (order + j for j in reversed(range(steps))):
        ratio = 1.0 / (2.0 * v + rho * value.ratio)
        value = Radial(
            log=value.log + torch.log1p(rho * value.ratio / (2.0 * v)),
            ratio=ratio,
            curvature=ratio**2 * (2.0 * v - rho * value.curvature),
        )
    # tanh' decays exponentially: the recurrence's last subtraction would leave only rounding
    if order == 0.5:
        decay = torch.exp(-2.0 * rho.sqrt())
        value = value._replace(curvature=4.0 * decay / (1.0 + decay) ** 2)
    return value


def scaled_log(order: float, radius: float, rows: Tensor) -> Tensor:
    """K_v(R |theta|) for each row theta, differentiable twice."""
    return radial(order, ((radius * rows) ** 2).sum(-1)).log


def scaled_mean(order: float, radius: float, rows: Tensor) -> Tensor:
    """R B_v(R |theta|) theta / |theta| for each row theta."""
    return scaled_ratio(order, radius, norms(rows))[..., None] * (radius * rows)


def scaled_ratio(order: float, radius: float, size: Tensor) -> Tensor:
    """R q_v(R size) = B_v(r) / size with r = R size."""
    return radius * radial(order, (radius * size) ** 2).ratio


def spread(order: float, radius: float, size: Tensor) -> tuple[Tensor, Tensor]:
    """R^2 q_v and R^2 B_v' at r = R size: the tilted variances across and along theta, size =
    |theta|.
    """
    value = radial(order, (radius * size) ** 2)
    return radius * (radius * value.ratio), radius * (radius * value.curvature)


def _debye(nu: float, rho: Tensor) -> Radial:
    """Radial functions at order v = nu + 1 by the uniform expansion in 1/nu, with z = r/nu, w =
    sqrt(1+z^2), t = 1/w.

    B = z/(1+w) + z t E(t) with E = D/U, U = sum U_k(t) nu^-k and D = sum (V_k - U_k) / (1 - t^2)
    nu^-k.
    """
    z2 = rho / nu**2
    w = torch.sqrt(1.0 + z2)
    t = 1.0 / w
    x = z2 / (1.0 + w)  # w - 1 without cancellation
    u_series, d_series, gap_series = _series(nu)
    u, du = _horner(u_series, t)
    d, dd = _horner(d_series, t)
    gap, _ = _horner(gap_series, t)  # (U(1) - U(t)) / (1 - t)
    e, de = d / u, (dd * u - d * du) / u**2
    return Radial(
        log=nu * (x - torch.log1p(0.5 * x))
        - 0.5 * torch.log1p(x)
        + torch.log1p(-x * t * gap / sum(u_series)),
        ratio=(1.0 / (1.0 + w) + t * e) / nu,
        curvature=(t / (1.0 + w) + t**3 * e - (z2 * t**2) * t**2 * de) / nu,
    )


def _horner(coefficients: list[float], t: Tensor) -> tuple[Tensor, Tensor]:
    """Polynomial and derivative, coefficients in rising powers."""
    value, slope = torch.zeros_like(t), torch.zeros_like(t)
    for c in reversed(coefficients):
        slope = slope * t + value
        value = value * t + c
    return value, slope


@cache
def _series(nu: float) -> tuple[list[float], list[float], list[float]]:
    """Coefficients in t of U, D and (U(1) - U(t)) / (1 - t), summed over k with weights nu^-k.

    U_{k+1} = t^2 (1 - t^2) U_k' / 2 + (1/8) int_0^t (1 - 5 s^2) U_k ds (DLMF 10.41.9), and V_k -
    U_k = -(1 - t^2) (t U_{k-1} / 2 + t^2 U_{k-1}') (DLMF 10.41.11).
    """
    t, term = Polynomial([0.0, 1.0]), Polynomial([1.0])
    u, d = term, 0.0 * term
    for k in range(1, TERMS + 1):
        d = d - (0.5 * t * term + t**2 * term.deriv()) / nu**k
        inner = ((1.0 - 5.0 * t**2) * term).integ()
        term = 0.5 * t**2 * (1.0 - t**2) * term.deriv() + 0.125 * inner
        u = u + term / nu**k
    gap = np.cumsum(u.coef[:0:-1])[::-1]  # (1 - t^i) / (1 - t) = 1 + t + ... + t^(i-1)
    return u.coef.tolist(), d.coef.tolist(), gap.tolist()
