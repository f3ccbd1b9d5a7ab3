"""The exact error averaged over Gaussian queries, integrated: no query is drawn.

    E||Gamma_n - Gamma||^2 = E[ f1(n, s) a^T G a / s^2 + f2(n, s) (tr G - a^T G a / s^2) ]

over the law of (s, a^T G a) of ``score_law``: by a trapezoid rule in log s on its density where the
score's vector has mean 0, direction by direction (``shifted``) where it has not. Steps are halved
until the sums stand.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import scipy.stats
from numpy.polynomial import chebyshev
from scipy.interpolate import CubicSpline

from esscher.attention.head import Head
from esscher.convergence.curve import ErrorCurve
from esscher.convergence.integral.gaussian import S_MAX, gaussian_error_slopes
from esscher.convergence.queries.law import UNSURE, relative_change
from esscher.convergence.queries.score import ScoreLaw, score_law
from esscher.convergence.queries.shifted import Nodes, shifted_nodes
from esscher.measures.base import Measure
from esscher.measures.matrices import product

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


def gaussian_queries_curve(
    head: Head, measure: Measure, queries: Measure, n: Counts
) -> ErrorCurve | None:
    """The curve over Gaussian queries of any mean and covariance, on Gaussian tokens; None where
    the integral is not right to ``UNSURE``.
    """
    law, trace, alike = score_law(head, measure, queries)
    parts, accuracy = (_by_direction if law.shifts.any() else _integrate)(law, trace, n)
    if not accuracy < UNSURE:  # or NaN
        return None
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
        q95=_quantile_error(law, trace, trace / head.dim, n) if alike else None,
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
        s = np.array([math.sqrt(law.floor)])
        return _sums(Nodes(s, np.ones(1), np.array([float(law.cross.sum())])), trace, n), 1e-12
    first, step, count = _grid(law)
    sums, found, change, beyond = np.zeros((3, n.size)), np.zeros((3, n.size)), math.inf, False
    mass, near = 0.0, sums
    for level in range(HALVINGS + 1):
        log_s = first + step * (np.arange(count) if level == 0 else np.arange(count - 1) + 0.5)
        t = np.exp(2.0 * log_s)
        log_scale, one, form = law.densities(t)
        scale = 2.0 * step * np.exp(2.0 * log_s + log_scale)
        weight, s = scale * one, np.sqrt(law.floor + t)
        keep = weight > NEGLIGIBLE
        added = _sums(Nodes(s[keep], weight[keep], (scale * form)[keep]), trace, n)
        if level == 0:
            near = _sums(Nodes(s[:1], np.ones(1), form[:1] / one[:1]), trace, n)
            beyond = float(weight[s > S_MAX].sum()) > 1e-12
            sums, mass = added, float(weight.sum())
        else:
            sums, mass = 0.5 * (sums + added), 0.5 * (mass + float(weight.sum()))
            step, count = 0.5 * step, 2 * count - 1
        # what lies below the first node has its error
        before, found = found, sums + (1.0 - mass) * near
        change = relative_change(before[[0, 2]], found[[0, 2]])
        if change < STANDS:
            break
    return found, max(1e-12, change, mass - 1.0, EXTRAPOLATED if beyond else 0.0)


def _by_direction(law: ScoreLaw, trace: float, n: Counts) -> tuple[Floats, float]:
    """As ``_integrate``, where the score's vector has a mean."""
    found, accuracy = np.zeros((3, n.size)), math.inf
    for level in range(HALVINGS + 1):
        nodes = shifted_nodes(law, level)
        if nodes is None:
            break
        before, found = found, _sums(nodes, trace, n)
        beyond = float(np.abs(nodes.one[nodes.s > S_MAX]).sum()) > 1e-12
        accuracy = max(
            relative_change(before[[0, 2]], found[[0, 2]]), abs(float(nodes.one.sum()) - 1.0)
        )
        if accuracy < STANDS:
            break
        accuracy = max(accuracy, EXTRAPOLATED if beyond else 0.0)
    return found, max(1e-12, accuracy)


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


def _sums(nodes: Nodes, trace: float, n: Counts) -> Floats:
    """Sums over the nodes of f1 a^T G a / s^2 + f2 (trace - a^T G a / s^2), of its derivative in
    log n, and of f2, at each n.
    """
    s = nodes.s
    inside = s <= S_MAX
    f1, f2, df1, df2 = (np.empty((s.size, n.size)) for _ in range(4))
    at = gaussian_error_slopes(n[None, :], s[inside][:, None])
    f1[inside], f2[inside], df1[inside], df2[inside] = at.f1, at.f2, at.df1_dlogn, at.df2_dlogn
    if not inside.all():
        f1[~inside], f2[~inside], df1[~inside], df2[~inside] = _frozen(s[~inside], n)
    # at s = 0 there is no direction along the tilt
    along = nodes.form / np.where(s > 0, s, math.inf) ** 2
    across = trace * nodes.one - along
    return np.stack([along @ f1 + across @ f2, along @ df1 + across @ df2, nodes.one @ f2])


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


def _quantile_error(law: ScoreLaw, trace: float, per_direction: float, n: Counts) -> Floats | None:
    """The error at the 95 % quantile of s, where V keeps angles: it rises with s. None where that
    quantile is not known: unequal variances and a mean.
    """
    if law.values.size == 0:
        t = 0.0
    elif not law.shifts.any():
        t = _quantile(law)
    elif law.values.size == 1:
        top = float(law.values[0])
        t = top * float(scipy.stats.ncx2.ppf(LEVEL, law.counts[0], law.shifts[0] / top))
    else:
        return None
    if not math.isfinite(t):
        return None
    s = math.sqrt(law.floor + t)
    form = s**2 * per_direction
    mse: Floats = _sums(Nodes(np.array([s]), np.ones(1), np.array([form])), trace, n)[0]
    return np.sqrt(mse)


def _quantile(law: ScoreLaw) -> float:
    """The 95 % quantile of s^2 - floor, from the density on a fine grid in log s."""
    first, step, count = _grid(law)
    log_s = np.linspace(first, first + step * (count - 1), 8 * count)
    log_scale, one, _ = law.densities(np.exp(2.0 * log_s))
    chance = CubicSpline(log_s, 2.0 * np.exp(2.0 * log_s + log_scale) * one).antiderivative()
    target = float(chance(log_s[-1])) - (1.0 - LEVEL)
    low, high = float(log_s[0]), float(log_s[-1])
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if float(chance(middle)) < target else (low, middle)
    return math.exp(2.0 * low)
