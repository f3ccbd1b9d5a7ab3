"""A law of queries for an exact curve: as weighted rows where that is exact, drawn with its
standard error where it is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import scipy.stats
import torch
from numpy.polynomial import chebyshev
from torch import Tensor

from esscher.attention.head import Head
from esscher.errors.curve import ErrorCurve, QueryErrors
from esscher.errors.gaussian import S_MAX, gaussian_error_slopes
from esscher.measures.base import Measure
from esscher.measures.matrices import is_diagonal, product

Floats = npt.NDArray[np.float64]

RADII = 24  # nodes of a radius, doubled until the curve stands
STANDS, UNSURE = 1e-11, 1e-6  # relative change that ends the doubling, and that the last may have
DOUBLINGS = 4
LEVEL = 0.95


def integrated(
    over: Callable[..., ErrorCurve], head: Head, measure: Measure, queries: Measure
) -> ErrorCurve | None:
    """The curve over a law of queries that is finitely many rows, ``over`` giving that of rows;
    None where it is not, or where its rule of radii does not converge.

    Pools of equal weights and small Rademacher cubes: their points. Tokens and queries both
    rotation-invariant and A a multiple of an orthogonal matrix: the error depends on |x| and on |V
    u|^2, u uniform and independent of |x|, so V may be replaced by |V|_F I / sqrt(d) and the
    direction by any; the radius has a Gauss-Jacobi rule. A uniform law on the line is a ball.
    """
    points, turned = queries.points(), queries.as_rotational()
    if points is not None:
        curve = over(head, points.to(measure.device), None)
        return replace(curve, origin=f"{curve.origin}; the law of queries integrated")
    # the error is analytic in x^2 on the whole line
    entire = measure.is_even and measure.subgaussian_root is not None
    line = measure.dim == queries.dim == 1 and entire and head.tilt_bias is None
    if turned is None or not (line or _turns_alike(head, measure)):
        return None
    size = float(head.V.double().norm()) / math.sqrt(head.dim)
    even = torch.eye(head.dim, dtype=torch.float64, device=measure.device)
    one = head if line else Head(head.A, size * even)
    first = torch.eye(1, queries.dim, dtype=torch.float64, device=measure.device)
    quantile = turned.quantile(np.array(LEVEL))  # the last row, of weight 0

    def at(nodes: int) -> ErrorCurve:
        radii, weights = turned.lengths(nodes)
        rows = torch.from_numpy(np.append(radii, quantile))[:, None].to(first) * first
        return over(one, rows, np.append(weights, 0.0))

    curve, change = at(RADII), 0.0
    if len(turned.lengths(RADII)[0]) > 1:
        for doubled in range(1, DOUBLINGS + 1):
            before, curve = curve.rms, at(RADII << doubled)
            change = relative_change(before, curve.rms)
            if change < STANDS:
                break
    if not change < UNSURE:
        return None
    assert curve.queries is not None
    alike = is_multiple_of_identity(product(head.V.double().T, head.V.double()), 1e-12)
    return replace(
        curve,
        # nodes of a rule are not queries and are left out
        q95=np.sqrt(curve.queries.mse[-1]) if alike else None,
        queries=None,
        accuracy=max(curve.accuracy, change),
        origin=f"{curve.origin}; the law of queries integrated",
    )


def _turns_alike(head: Head, measure: Measure) -> bool:
    """The law of the tokens is rotation-invariant, A is a multiple of an orthogonal matrix, and
    there are no biases.
    """
    if measure.as_rotational() is None or head.tilt_bias is not None or head.value_bias is not None:
        return False
    A = head.A.double()
    return A.shape[0] == A.shape[1] and is_multiple_of_identity(product(A.T, A), 1e-13)


def is_multiple_of_identity(gram: Tensor, tol: float) -> bool:
    size = float(gram.diagonal().mean())
    return bool((gram - size * torch.eye(len(gram)).to(gram)).abs().max() <= tol * size)


def relative_change(before: Floats, found: Floats) -> float:
    """The largest relative change of a number; 0 where both are 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(before == found, 0.0, np.abs(before / found - 1.0)).max())


def drawn(curve: ErrorCurve, seed: int) -> ErrorCurve:
    """A curve over queries drawn from their law, with the standard error that drawing them leaves
    in rms.
    """
    assert curve.queries is not None
    mse = curve.queries.mse
    count = len(mse)
    # an error of exactly 0 has no relative spread
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = mse.std(axis=0, ddof=1) if count > 1 else np.full(curve.n.size, np.nan)
        stderr = np.where(spread == 0, 0.0, spread / math.sqrt(count) / (2.0 * curve.rms))
        rising = (
            None
            if curve.slope is None or curve.queries.dmse_dlogn is None
            else _slope_stderr(curve.queries, curve.slope)
        )
    origin = f"{curve.origin}; mean over {count} queries drawn from their law (seed {seed})"
    return replace(curve, query_stderr=stderr, slope_stderr=rising, origin=origin)


def _slope_stderr(queries: QueryErrors, slope: Floats) -> Floats:
    """Of slope = mean(dmse/dlog n) / (2 mean(mse)), a ratio of means: the spread of dmse / 2 -
    slope mse over the queries.
    """
    assert queries.dmse_dlogn is not None
    count = len(queries.mse)
    if count < 2:
        return np.full(slope.shape, np.nan)
    rest = 0.5 * queries.dmse_dlogn - slope * queries.mse
    found: Floats = rest.std(axis=0, ddof=1) / math.sqrt(count) / queries.mse.mean(axis=0)
    return np.nan_to_num(found, nan=0.0)  # no error at all has no slope


# ---- Gaussian queries on Gaussian tokens, integrated: no query is drawn.
#
# The error at a query depends on the score's deviation s and on a^T G a / s^2, where a = L^T A x is
# the score's vector, s = |a|, L L^T the covariance of the tokens and G = L^T V^T V L. Centred a has
# independent coordinates of variances lambda_k in its eigenbasis.

Counts = npt.NDArray[np.int64]

BELOW = 33.0  # nodes begin at exp(-33) of the largest deviation
REACH = 14.0  # deviations to which they reach; what is left weighs exp(-98)
STEP = 0.25  # of log s at first; the law narrows like 1 / sqrt(d)
HALVINGS = 7
# f1/s^2 and f2 beyond S_MAX: polynomials in 1/s through values from here to S_MAX
FROZEN, DEGREE = 20.0, 10
EXTRAPOLATED = 1e-9  # their relative error for n up to 2^53


def gaussian_queries_curve(
    head: Head, measure: Measure, queries: Measure, n: Counts
) -> ErrorCurve | None:
    """The curve over Gaussian queries on Gaussian tokens; None where the score's vector has a mean,
    or where the integral is not right to ``UNSURE``.
    """
    root, A = measure.root, head.A.double()
    offset = A @ queries.mean.double()
    if head.tilt_bias is not None:
        offset = offset + head.tilt_bias.double()
    if bool((root.T @ offset).any()):
        return None
    spread = product(product(root.T, A), queries.root)
    value = product(head.V.double(), root)
    if is_diagonal(spread):
        variances = spread.diagonal() ** 2
    else:
        variances, basis = torch.linalg.eigh(product(spread, spread.T))
        variances, value = variances.clamp_min(0.0), value @ basis
    size = (value * value).sum(dim=0)
    values, traces, trace = variances.cpu().numpy(), size.cpu().numpy(), float(size.sum())
    spreads = values > 1e-14 * values.max()
    values, traces = values[spreads], traces[spreads] * values[spreads]
    parts, accuracy = _integrate(values, traces, trace, n)
    if not accuracy < UNSURE:  # or NaN
        return None
    mse, dmse, sum_p2 = parts
    with np.errstate(divide="ignore", invalid="ignore"):  # an error of exactly 0 has no slope
        slope = 0.5 * dmse / mse
    alike = is_multiple_of_identity(product(value.T, value), 1e-12)
    cov = measure.cov.double()
    centre = head.values((measure.mean.double() + head.tilt(queries.mean.double()) @ cov)[None])[0]
    moved = product(product(head.V.double(), cov), product(A, queries.root))
    return ErrorCurve(
        n=n,
        rms=np.sqrt(mse),
        kind="exact",
        scale=math.hypot(float(centre.norm()), float(moved.norm())),
        q95=_quantile_error(values, trace, trace / head.dim, n) if alike else None,
        slope=slope,
        effective_tokens=1.0 / sum_p2,
        delta=_delta(values, traces, trace),
        accuracy=accuracy,
        origin=(
            "exact, Gaussian tokens: f1 and f2 of the score's standard deviation; the law of"
            " queries integrated"
        ),
    )


def _delta(values: Floats, traces: Floats, trace: float) -> float:
    """E exp(s^2) (tr G + a^T G a), lim n * MSE; infinite where a variance is 1/2 or more."""
    q = 1.0 - 2.0 * values
    if (q <= 0.0).any():
        return math.inf
    log_size = -0.5 * float(np.log(q).sum())
    return math.exp(log_size) * (trace + float((traces / q).sum())) if log_size < 700 else math.inf


def _integrate(values: Floats, traces: Floats, trace: float, n: Counts) -> tuple[Floats, float]:
    """Mean squared error, its derivative in log n and E sum_j p_j^2 at each n, and their relative
    accuracy: a trapezoid rule in log s, halved until it stands.

    ``values``: variances lambda_k > 0 of the coordinates of a; ``traces``: lambda_k G_kk.
    """
    if values.size == 0:  # every query has the score's deviation 0
        return _sums(np.zeros(1), np.ones(1), np.zeros(1), trace, n), 1e-12
    top, mean = math.sqrt(float(values.max())), math.sqrt(float(values.sum()))
    step = STEP / max(1.0, math.sqrt(values.sum() ** 2 / (values**2).sum() / 5.0))
    found, accuracy = np.zeros((3, n.size)), math.inf
    for halved in range(HALVINGS + 1):
        each = step / 2**halved
        s = np.exp(np.arange(math.log(top) - BELOW, math.log(mean + REACH * top), each))
        log_scale, one, form = chi_square_densities(values, traces, s**2)
        weight = 2.0 * each * s**2 * np.exp(log_scale)
        used = weight * one > 1e-30
        s, one, form = s[used], (weight * one)[used], (weight * form)[used]
        before, found = found, _sums(s, one, form, trace, n)
        change = relative_change(before[[0, 2]], found[[0, 2]])
        accuracy = max(change, abs(float(one.sum()) - 1.0))
        if accuracy < STANDS:
            break
        beyond = float(one[s > S_MAX].sum()) > 1e-12
        accuracy = max(accuracy, EXTRAPOLATED if beyond else 0.0)
    return found, max(1e-12, accuracy)


def chi_square_densities(
    values: Floats, traces: Floats, t: Floats
) -> tuple[Floats, Floats, Floats]:
    """The density of |a|^2 = sum_k lambda_k g_k^2 at t, g_k standard normal, and the same weighted
    by E[a^T G a | t], both over exp of the first array.

    Their Laplace transforms D(p) = prod_k (1 + 2 p lambda_k)^(-1/2) and D(p) sum_k lambda_k G_kk /
    (1 + 2 p lambda_k) are inverted on a parabola through the saddle point of D(p) e^(pt), where a
    trapezoid rule is right to rounding relative to the density itself, in its tails too.
    """
    values, group = np.unique(values, return_inverse=True)
    counts = np.bincount(group).astype(np.float64)
    traces = np.bincount(group, traces).astype(np.float64)
    top = values.max()
    gap = 1.0 - values / top
    # mu > 0 with sum_k lambda_k / q_k = t, by bisection of its logarithm: a few digits suffice
    low, high = np.log(0.25 / t), np.log(2.0 * float(counts.sum()) / t + 1e-300)
    for _ in range(40):
        middle = 0.5 * (low + high)
        q = gap + 2.0 * np.exp(middle)[:, None] * values
        above = values / q @ counts > t
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    mu = np.exp(0.5 * (low + high))
    q = gap + 2.0 * mu[:, None] * values
    log_scale = (mu - 0.5 / top) * t - 0.5 * np.log(q) @ counts
    curvature = 2.0 * (values / q) ** 2 @ counts
    step = np.minimum(0.1, 0.5 / np.sqrt(4.0 * mu**2 * curvature))
    one, form = np.zeros_like(t), np.zeros_like(t)
    for k in range(int(np.ceil((np.sqrt(46.0 / (mu * t)) / step).max())) + 1):
        turn = 1.0 + 1j * k * step
        at = mu * turn**2
        q = gap + 2.0 * at[:, None] * values
        log = (at - 0.5 / top) * t - 0.5 * np.log(q) @ counts
        share = (0.5 if k == 0 else 1.0) * step * 2.0 * mu / np.pi * turn * np.exp(log - log_scale)
        one += share.real
        form += (share * (traces / q).sum(axis=1)).real
    return log_scale, one, form


def _sums(s: Floats, one: Floats, form: Floats, trace: float, n: Counts) -> Floats:
    """Sums over nodes s of f1 a^T G a / s^2 + f2 (trace - a^T G a / s^2), of its derivative in
    log n, and of f2, at each n: sum(one h(s)) = E h(s), sum(form h(s)) = E h(s) a^T G a.
    """
    inside = s <= S_MAX
    f1, f2, df1, df2 = (np.empty((s.size, n.size)) for _ in range(4))
    at = gaussian_error_slopes(n[None, :], s[inside][:, None])
    f1[inside], f2[inside], df1[inside], df2[inside] = at.f1, at.f2, at.df1_dlogn, at.df2_dlogn
    if not inside.all():
        f1[~inside], f2[~inside], df1[~inside], df2[~inside] = _frozen(s[~inside], n)
    # at s = 0 there is no direction along the tilt
    along = form / np.where(s > 0, s, math.inf) ** 2
    across = trace * one - along
    return np.stack([along @ f1 + across @ f2, along @ df1 + across @ df2, one @ f2])


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


def _quantile_error(values: Floats, trace: float, per_direction: float, n: Counts) -> Floats | None:
    """The error at the 95 % quantile of s, where V keeps angles: it rises with s. None where that
    quantile is not known: unequal variances.
    """
    if values.size and np.ptp(values) > 1e-12 * values.max():
        return None
    count = values.size
    t = float(values.max()) * float(scipy.stats.chi2.ppf(LEVEL, count)) if count else 0.0
    s, form = np.array([math.sqrt(t)]), np.array([t * per_direction])
    return np.asarray(np.sqrt(_sums(s, np.ones(1), form, trace, n)[0]))
