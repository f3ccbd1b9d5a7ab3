"""The exact error averaged over Gaussian queries, integrated: no query is drawn.

    E||Gamma_n - Gamma||^2 = E[ f1(n, s) a^T G a / s^2 + f2(n, s) (tr G - a^T G a / s^2) ]

over the law of (s, a^T G a) of ``score_law``, by a trapezoid rule in log s that is halved until it
stands.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from numpy.polynomial import chebyshev
from scipy.interpolate import CubicSpline

from esscher.attention.head import Head
from esscher.convergence.curve import ErrorCurve
from esscher.convergence.integral.gaussian import S_MAX, gaussian_error_slopes
from esscher.convergence.queries.score import ScoreLaw, score_law
from esscher.measures.base import Measure
from esscher.measures.spectrum import product

__all__ = ["gaussian_queries_curve"]

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

STANDS = 1e-11  # relative change at which the rule in log s is no longer halved
HALVINGS = 7
# deviations beyond the root mean square of s to which the rule reaches; what is left weighs
# exp(-98)
OUTER = 14.0
INNER = 9.0  # deviations below it
NEAR_ZERO = 1e-17  # mass times s^2 left out at s = 0, where f1 and f2 are constant up to s^2
NEGLIGIBLE = 1e-45  # weight of a node that is not evaluated
LEVEL = 0.95
# f1/s^2 and f2 beyond S_MAX: polynomials in 1/s through values from here to S_MAX
FROZEN, DEGREE = 20.0, 10
EXTRAPOLATED = 1e-9  # their relative error for n up to 2^53


def gaussian_queries_curve(head: Head, measure: Measure, queries: Measure, n: Counts) -> ErrorCurve:
    """The curve over Gaussian queries of any mean and covariance, on Gaussian tokens."""
    law, trace, alike = score_law(head, measure, queries)
    parts, accuracy = _integrate(law, trace, n)
    mse, dmse, sum_p2 = parts
    with np.errstate(divide="ignore", invalid="ignore"):  # an error of exactly 0 has no slope
        slope = 0.5 * dmse / mse
    cov = measure.cov.double()
    centre = head.values((measure.mean.double() + head.tilt(queries.mean.double()) @ cov)[None])[0]
    spread = product(product(head.V.double(), cov), product(head.A.double(), queries.root))
    size, form = law.growth(1.0)
    return ErrorCurve(
        n=n,
        rms=np.sqrt(mse),
        kind="exact",
        scale=math.hypot(float(centre.norm()), float(spread.norm())),
        q95=(
            np.sqrt(_errors(np.array([_quantile(law)]), trace / head.dim, trace, n)[0][0])
            if alike
            else None
        ),
        slope=slope,
        effective_tokens=1.0 / sum_p2,
        delta=size * trace + form if math.isfinite(size) else math.inf,
        accuracy=accuracy,
        origin=(
            "exact, Gaussian tokens: f1 and f2 of the score's standard deviation; the law of"
            " queries integrated"
        ),
    )


def _integrate(law: ScoreLaw, trace: float, n: Counts) -> tuple[Floats, float]:
    """Mean squared error, its derivative in log n and E sum_j p_j^2 at each n, and their relative
    accuracy.
    """
    if law.values.size == 0:  # every query has the same s
        s = math.sqrt(law.floor)
        along = float(law.cross.sum()) / law.floor if law.floor > 0 else 0.0
        return np.stack([part[0] for part in _errors(np.array([s]), along, trace, n)]), 1e-12
    first, step, count = _grid(law)
    sums, found, change, beyond = np.zeros((3, n.size)), np.zeros((3, n.size)), math.inf, False
    mass, near = 0.0, sums
    for level in range(HALVINGS + 1):
        log_s = first + step * (np.arange(count) if level == 0 else np.arange(count - 1) + 0.5)
        t = np.exp(2.0 * log_s)
        log_scale, one, form = law.densities(t)
        weight = 2.0 * step * np.exp(2.0 * log_s + log_scale) * one
        s = np.sqrt(law.floor + t)
        along = form / one / s**2
        keep = weight > NEGLIGIBLE
        added = np.stack([weight[keep] @ part for part in _errors(s[keep], along[keep], trace, n)])
        if level == 0:
            near = np.stack([part[0] for part in _errors(s[:1], along[:1], trace, n)])
            beyond = float(weight[s > S_MAX].sum()) > 1e-12
            sums, mass = added, float(weight.sum())
        else:
            sums, mass = 0.5 * (sums + added), 0.5 * (mass + float(weight.sum()))
            step, count = 0.5 * step, 2 * count - 1
        # what lies below the first node has its error
        before, found = found, sums + (1.0 - mass) * near
        with np.errstate(divide="ignore", invalid="ignore"):  # V = 0 has no error
            change = float(np.nan_to_num(np.abs(before / found - 1.0)[[0, 2]], nan=0.0).max())
        if change < STANDS:
            break
    return found, max(1e-12, change, EXTRAPOLATED if beyond else 0.0)


def _grid(law: ScoreLaw) -> tuple[float, float, int]:
    """First log s, step and number of nodes of the coarsest rule.

    |a| is Lipschitz in standard normals with constant sigma = sqrt(max lambda), so P(|a| >
    sqrt(E|a|^2) + r) and P(|a| < sqrt(E|a|^2 - sigma^2) - r) are at most exp(-r^2 / (2 sigma^2)).
    Near 0 the mass of |a| < e is at most e / sigma.
    """
    sigma, size = math.sqrt(float(law.values.max())), math.sqrt(law.mean)
    inner = math.sqrt(max(law.mean - sigma**2, 0.0)) - INNER * sigma
    if inner < 0.1 * size:
        inner = min(1e-3 * size, (NEAR_ZERO * sigma) ** (1.0 / 3.0))
    first, last = math.log(inner), math.log(size + OUTER * sigma)
    step = min(0.2, 0.5 * law.deviation / (2.0 * law.mean))
    count = math.ceil((last - first) / step) + 1
    return first, step, count


def _errors(
    s: Floats, along: Floats | float, trace: float, n: Counts
) -> tuple[Floats, Floats, Floats]:
    """f1 along + f2 (trace - along), its derivative in log n, and f2, for each s and n; ``along`` =
    a^T G a / s^2.
    """
    inside = s <= S_MAX
    f1, f2, df1, df2 = (np.empty((s.size, n.size)) for _ in range(4))
    at = gaussian_error_slopes(n[None, :], s[inside][:, None])
    f1[inside], f2[inside], df1[inside], df2[inside] = at.f1, at.f2, at.df1_dlogn, at.df2_dlogn
    if not inside.all():
        f1[~inside], f2[~inside], df1[~inside], df2[~inside] = _frozen(s[~inside], n)
    line = np.broadcast_to(np.asarray(along, np.float64), s.shape)[:, None]
    rest = np.maximum(trace - line, 0.0)
    return line * f1 + rest * f2, line * df1 + rest * df2, f2


def _frozen(s: Floats, n: Counts) -> tuple[Floats, Floats, Floats, Floats]:
    """f1, f2 and their derivatives in log n beyond S_MAX, where attention takes the largest of n
    tokens up to powers of 1/s.
    """
    points = chebyshev.chebpts1(DEGREE + 1)
    low, high = 1.0 / S_MAX, 1.0 / FROZEN
    nodes = 1.0 / (low + 0.5 * (high - low) * (points + 1.0))
    at = gaussian_error_slopes(n[None, :], nodes[:, None])
    x = 2.0 * (1.0 / s - low) / (high - low) - 1.0
    powers = ((at.f1, 2), (at.f2, 0), (at.df1_dlogn, 1), (at.df2_dlogn, 0))
    fits = [
        (chebyshev.chebfit(points, values / nodes[:, None] ** power, DEGREE), power)
        for values, power in powers
    ]
    f1, f2, df1, df2 = (chebyshev.chebval(x, fit).T * s[:, None] ** power for fit, power in fits)
    return f1, f2, df1, df2


def _quantile(law: ScoreLaw) -> float:
    """The 95 % quantile of s, from the density on a fine grid in log s; the error of alike
    directions rises with s.
    """
    if law.values.size == 0:
        return math.sqrt(law.floor)
    first, step, count = _grid(law)
    log_s = np.linspace(first, first + step * (count - 1), 8 * count)
    log_scale, one, _ = law.densities(np.exp(2.0 * log_s))
    chance = CubicSpline(log_s, 2.0 * np.exp(2.0 * log_s + log_scale) * one).antiderivative()
    target = float(chance(log_s[-1])) - (1.0 - LEVEL)
    low, high = float(log_s[0]), float(log_s[-1])
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if float(chance(middle)) < target else (low, middle)
    return math.sqrt(law.floor + math.exp(2.0 * low))
