"""The law of s and a^T G a over Gaussian queries whose score's vector a has a mean: one direction
after the other, without a density.

Errors are smooth even functions h of s, and E h(|a|) asks for no density of |a|: from s_0, the part
of a that does not vary, each direction takes s to sqrt(s^2 + a_k^2), a_k ~ N(b_k, lambda_k). The
law is held as weights at s_j = SCALE sinh((j + 1/2) delta): a point between two of these gives its
weight to its ``STENCIL`` neighbours so that polynomials keep their means (Lagrange), and a_k has a
trapezoid rule. All is right as far as h is a polynomial across a stencil, whatever the covariance
is; halving delta and the rule's step tells how far. Beside the weights go those of U = sum_k a_k
v_k, v_k the columns of V L, and of |U|^2 = a^T G a. Directions of equal variance are one along
their mean and a chi law across it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from esscher.convergence.queries.score import ScoreLaw

__all__ = ["Nodes", "shifted_nodes"]

Floats = npt.NDArray[np.float64]

SCALE = 2.0  # nodes are evenly spaced below it and geometric above
STENCIL = 16
REACH = 14.0  # deviations to which the rules reach; what is left weighs exp(-98)
SPACING, STEP = 0.08, 0.8  # of nodes, and of the rules in deviations, at level 0
MOST = 3000  # nodes; more are not worth their memory


@dataclass(frozen=True)
class Nodes:
    """``sum(one * h(s))`` = E h(s), and ``sum(form * h(s))`` = E h(s) a^T G a."""

    s: Floats
    one: Floats
    form: Floats


def shifted_nodes(law: ScoreLaw, level: int) -> Nodes | None:
    """The law as weights of both signs; each ``level`` halves all steps. None where that would take
    more than ``MOST`` nodes.
    """
    delta, step = SPACING / 2**level, STEP / 2**level
    far = math.sqrt(law.floor + law.mean) + REACH * math.sqrt(float(law.values.max()))
    count = math.ceil(math.asinh(far / SCALE) / delta) + STENCIL
    if count > MOST:
        return None
    s = SCALE * np.sinh((np.arange(count) + 0.5) * delta)
    none = np.zeros(1)
    one = _moved(np.full(1, math.sqrt(law.floor)), none, np.ones(1), none, delta, count)[0][:, 0]
    form, along = one * law.cross[-1, -1], np.zeros((count, law.cross.shape[0]))
    along[:, -1] = one  # U as sums of the columns of ``cross``
    for k, (variance, shift) in enumerate(zip(law.values, law.shifts, strict=True)):
        sigma, others, rest = math.sqrt(variance), int(law.counts[k]), law.traces[k] / variance
        if shift > 0.0:
            mean = math.sqrt(shift)
            a, weight = _normal(mean, sigma, step)
            same, once, twice = _moved(s, a, weight, a / mean, delta, count)
            form = (
                same @ form
                + 2.0 * once @ (along @ law.cross[:, k])
                + law.cross[k, k] * (twice @ one)
            )
            along, one, first = same @ along, same @ one, once @ one
            along[:, k] += first
            others, rest = others - 1, max(rest - law.cross[k, k] / shift, 0.0)
        if others > 0:
            a, weight = _normal(0.0, sigma, step) if others == 1 else _chi(others, sigma, step)
            same, _, twice = _moved(s, a, weight, a, delta, count)
            form = same @ form + rest / others * (twice @ one)
            along, one = same @ along, same @ one
    return Nodes(s, one, form)


def _normal(mean: float, sigma: float, step: float) -> tuple[Floats, Floats]:
    """Nodes and weights of N(mean, sigma^2): even ones, or where it is broad a = SCALE sinh y."""
    if sigma <= 0.25 * math.hypot(mean, SCALE):
        z = step * np.arange(-math.ceil(REACH / step), math.ceil(REACH / step) + 1.0)
        return mean + sigma * z, step * np.exp(-0.5 * z**2) / math.sqrt(2.0 * math.pi)
    low, high = (math.asinh((mean + side * REACH * sigma) / SCALE) for side in (-1, 1))
    y = np.arange(low, high, 0.25 * step)
    a, slope = SCALE * np.sinh(y), SCALE * np.cosh(y)
    z = (a - mean) / sigma
    return a, 0.25 * step / sigma * slope * np.exp(-0.5 * z**2) / math.sqrt(2.0 * math.pi)


def _chi(count: int, sigma: float, step: float) -> tuple[Floats, Floats]:
    """Nodes and weights of sigma chi, ``count`` at least 2 degrees of freedom: even in its
    logarithm.
    """
    root, each = math.sqrt(count), step * min(0.25, 1.0 / math.sqrt(2.0 * count))
    low = math.log(max(root - REACH, root * math.exp(-1.0 - 46.0 / count)))
    y = np.arange(low, math.log(root + REACH), each)
    log = count * y - 0.5 * np.exp(2.0 * y) - (0.5 * count - 1.0) * math.log(2.0)
    return sigma * np.exp(y), each * np.exp(log - math.lgamma(0.5 * count))


@numba.njit(cache=True, error_model="numpy")
def _moved(s: Floats, a: Floats, weight: Floats, x: Floats, delta: float, count: int) -> Floats:
    """Three matrices that take weights at ``s`` to the nodes: each s to sqrt(s^2 + a^2), a drawn by
    ``weight``, times 1, x and x^2.
    """
    out, signs, share = np.zeros((3, count, s.size)), np.ones(STENCIL), np.empty(STENCIL)
    for p in range(1, STENCIL):
        signs[p] = -signs[p - 1] * (STENCIL - p) / p
    for j in range(s.size):
        for m in range(a.size):
            at = math.asinh(math.hypot(s[j], a[m]) / SCALE) / delta - 0.5
            at = min(at, count - 1.0 - STENCIL // 2)  # beyond is nothing
            first = math.floor(at) - STENCIL // 2 + 1
            total = 0.0
            for p in range(STENCIL):
                gap = at - (first + p)
                share[p] = signs[p] / (gap if gap != 0.0 else 1e-200)
                total += share[p]
            for p in range(STENCIL):
                # even in s: below the first node its mirror image
                i = first + p if first + p >= 0 else -1 - (first + p)
                w = weight[m] * share[p] / total
                out[0, i, j] += w
                out[1, i, j] += w * x[m]
                out[2, i, j] += w * x[m] * x[m]
    return out
