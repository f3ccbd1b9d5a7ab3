"""Moments and cumulants of one number, and the fourth moment of values from the derivatives of a
tilted covariance.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

WIDEST = 128  # dimension up to which a tilted covariance is differentiated
STEP = 1e-2  # of the differences that check the derivatives, in standard deviations of a value
AGREE = 1e-2  # relative


def power(number: float, order: int) -> float:
    """number^order, infinite beyond float64: an upper bound, where Python raises."""
    with np.errstate(over="ignore"):
        return float(np.float64(number) ** order)


def from_cumulants(cumulants: list[float]) -> float:
    """The last raw moment that goes with cumulants 1 .. r."""
    moments = [1.0]
    for r in range(1, len(cumulants) + 1):
        terms = (math.comb(r - 1, j) * cumulants[j] * moments[r - 1 - j] for j in range(r))
        moments.append(sum(terms))
    return moments[-1]


def to_cumulants(raw: list[float]) -> list[float]:
    """Cumulants 1 .. r of raw moments 1 .. r."""
    moments = [1.0, *raw]
    cumulants: list[float] = []
    for r in range(1, len(moments)):
        terms = (math.comb(r - 1, j) * cumulants[j] * moments[r - 1 - j] for j in range(r - 1))
        cumulants.append(moments[r] - sum(terms))
    return cumulants


def fourth_moment(
    tilted_cov: Callable[[Float64[Tensor, "m d"]], Float64[Tensor, "m d d"]],
    V: Float64[Tensor, "d_out d"],
) -> float | None:
    """E|w|^4 of w = V (y - E y), from the law's own tilted covariance C(theta) = Hess K(theta) of
    the tokens.

    With D = V C(0) V^T and the fourth cumulants of w, which are second derivatives of its tilted
    covariance,

        E|w|^4 = (tr D)^2 + 2 |D|_F^2 + sum_i (d/dt)^2 tr( V C(t V^T e_i) V^T ) at t = 0 .

    None where C cannot be differentiated at 0, or where differences do not bear the derivatives
    out.
    """

    def trace(cov: Float64[Tensor, "*m d d"]) -> Float64[Tensor, "*m"]:
        return torch.einsum("ai,...ij,aj->...", V, cov, V)

    if max(V.shape) > WIDEST:
        return None
    theta = torch.zeros(1, V.shape[1], dtype=torch.float64, device=V.device, requires_grad=True)
    curvature = 0.0
    with torch.enable_grad():
        cov = tilted_cov(theta)[0]
        if not cov.requires_grad:
            return None
        (slope,) = torch.autograd.grad(trace(cov), theta, create_graph=True)
        for row in V if slope.requires_grad else V[:0]:
            (bend,) = torch.autograd.grad(slope[0] @ row, theta, retain_graph=True)
            curvature += float(bend[0] @ row)
    spread = V @ cov.detach() @ V.T
    gaussian = float(spread.trace() ** 2 + 2.0 * spread.square().sum())
    moving = spread.diagonal() > 0
    steps = STEP / spread.diagonal()[moving].sqrt()
    ends = steps[:, None] * V[moving]
    both = trace(tilted_cov(torch.cat([ends, -ends])).detach()).reshape(2, -1).sum(0)
    checked = float(((both - 2.0 * spread.trace()) / steps**2).sum())
    found = gaussian + curvature
    agrees = abs(checked - curvature) <= AGREE * gaussian
    return found if math.isfinite(found) and agrees else None
