"""A law of queries for an exact curve: as weighted rows where that is exact, drawn with its
standard error where it is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numba
import numpy as np
import numpy.typing as npt
import scipy.stats
import torch
from numpy.polynomial import chebyshev

from esscher.attention.head import Head
from esscher.errors.curve import ErrorCurve, rms_stderr
from esscher.errors.gaussian import S_MAX, gaussian_error_slopes
from esscher.measures.base import Measure
from esscher.measures.matrices import is_diagonal, is_multiple_of_identity, product

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
    pool, turned = queries.as_pool(), queries.as_rotational()
    if pool is not None:
        curve = over(head, pool.tokens.double().to(measure.device), None)
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
    quantile = turned.quantile(LEVEL)  # the last row, of weight 0

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
    origin = f"{curve.origin}; mean over {len(mse)} queries drawn from their law (seed {seed})"
    return replace(curve, query_stderr=rms_stderr(mse), origin=origin)


# ---- Gaussian queries on Gaussian tokens, integrated: no query is drawn.
#
# The error at a query depends on the score's deviation s and on a^T G a / s^2, where a = L^T (A x +
# tilt bias) is the score's vector, s = |a|, L L^T the covariance of the tokens and G = L^T V^T V L.

Counts = npt.NDArray[np.int64]

HALVINGS = 7
# f1/s^2 and f2 beyond S_MAX: polynomials in 1/s through values from here to S_MAX
FROZEN, DEGREE = 20.0, 10
EXTRAPOLATED = 1e-9  # their relative error for n up to 2^53


@dataclass(frozen=True)
class ScoreLaw:
    """The law of the score's vector a, Gaussian with mean b, in its eigenbasis; directions of equal
    variance are one group, and the first group is that of variance 0, empty or not.
    """

    variances: Floats  # of each direction of a group
    counts: Floats  # directions of a group
    shifts: Floats  # |b|^2 in a group
    traces: Floats  # variance times tr G of a group
    steps: Floats  # V L b of a group's b, (groups, d_out)

    @classmethod
    def of(cls, variances: Floats, b: Floats, value: Floats) -> ScoreLaw:
        """From each direction's variance, its mean, and its column of V L."""
        variances = np.where(variances > 1e-14 * variances.max(), variances, 0.0)
        b = np.where(b**2 > 1e-32 * variances, b, 0.0)  # below is rounding
        levels = np.unique(np.append(0.0, variances))
        member = (variances[:, None] == levels).astype(np.float64)
        steps = member.T @ (value * b).T
        return cls(
            variances=levels,
            counts=member.sum(axis=0),
            shifts=b**2 @ member,
            traces=((value**2).sum(axis=0) * variances) @ member,
            steps=steps if b.any() else steps[:, :0],  # a centred law takes no steps
        )

    def delta(self, trace: float) -> float:
        """E exp(s^2) (tr G + a^T G a), lim n * MSE; infinite where a variance is 1/2 or more."""
        q = 1.0 - 2.0 * self.variances
        if (q <= 0.0).any():
            return math.inf
        log_size = float((-0.5 * self.counts * np.log(q) + self.shifts / q).sum())
        form = float((self.traces / q).sum() + ((1.0 / q) @ self.steps) @ ((1.0 / q) @ self.steps))
        return math.exp(log_size) * (trace + form) if log_size < 700.0 else math.inf


def gaussian_queries_curve(
    head: Head, measure: Measure, queries: Measure, n: Counts
) -> ErrorCurve | None:
    """The curve over Gaussian queries of any mean and covariance, on Gaussian tokens; None where
    the integral is not right to ``UNSURE``.
    """
    root, A = measure.root, head.A.double()
    spread = product(product(root.T, A), queries.root)
    offset = head.tilt(queries.mean.double()) @ root
    value = product(head.V.double(), root)
    if is_diagonal(spread):
        variances = spread.diagonal() ** 2
    else:
        variances, basis = torch.linalg.eigh(product(spread, spread.T))
        variances, offset, value = variances.clamp_min(0.0), offset @ basis, value @ basis
    trace = float((value * value).sum())
    law = ScoreLaw.of(variances.cpu().numpy(), offset.cpu().numpy(), value.cpu().numpy())
    parts, accuracy = _integrate(law, trace, n)
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
        q95=_quantile_error(law, trace, trace / head.dim, n) if alike else None,
        slope=slope,
        effective_tokens=1.0 / sum_p2,
        delta=law.delta(trace),
        accuracy=accuracy,
        origin=(
            "exact, Gaussian tokens: f1 and f2 of the score's standard deviation; the law of"
            " queries integrated"
        ),
    )


def _integrate(law: ScoreLaw, trace: float, n: Counts) -> tuple[Floats, float]:
    """Mean squared error, its derivative in log n and E sum_j p_j^2 at each n, and their relative
    accuracy: all steps are halved until the numbers stand.
    """
    if law.variances.size == 1:  # every query has the same s
        s, form = np.sqrt(law.shifts), np.array([float((law.steps**2).sum())])
        return _sums(s, np.ones(1), form, trace, n), 1e-12
    found, accuracy = np.zeros((3, n.size)), math.inf
    for level in range(HALVINGS + 1):
        nodes = _nodes(law, level)
        if nodes is None:
            break
        s, one, form = nodes
        before, found = found, _sums(s, one, form, trace, n)
        change = relative_change(before[[0, 2]], found[[0, 2]])
        accuracy = max(change, abs(float(one.sum()) - 1.0))
        if accuracy < STANDS:
            break
        beyond = float(np.abs(one[s > S_MAX]).sum()) > 1e-12
        accuracy = max(accuracy, EXTRAPOLATED if beyond else 0.0)
    return found, max(1e-12, accuracy)


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


def _quantile_error(law: ScoreLaw, trace: float, per_direction: float, n: Counts) -> Floats | None:
    """The error at the 95 % quantile of s, where V keeps angles: it rises with s. None where that
    quantile is not known: unequal variances.
    """
    if law.variances.size > 2:
        return None
    t = float(law.shifts[0])
    if law.variances.size == 2:
        top = float(law.variances[1])
        t += top * float(scipy.stats.ncx2.ppf(LEVEL, law.counts[1], law.shifts[1] / top))
    if not math.isfinite(t):
        return None
    s, form = np.array([math.sqrt(t)]), np.array([t * per_direction])
    return np.asarray(np.sqrt(_sums(s, np.ones(1), form, trace, n)[0]))


# ---- Nodes for the law of s and a^T G a: one direction of the score's vector after the other takes
# s to sqrt(s^2 + a^2), and its weight is shared out among the nodes nearby by interpolation.

SCALE = 2.0  # nodes are evenly spaced below it and geometric above
STENCIL = 16
REACH = 14.0  # deviations to which the rules reach; what is left weighs exp(-98)
SPACING, STEP = 0.08, 0.8  # of nodes, and of the rules in deviations, at level 0
MOST = 3000  # nodes; more are not worth their memory


def _nodes(law: ScoreLaw, level: int) -> tuple[Floats, Floats, Floats] | None:
    """s and weights of both signs, ``one`` and ``form``: sum(one h(s)) = E h(s), sum(form h(s)) =
    E h(s) a^T G a. Each ``level`` halves all steps; None where that would take more than ``MOST``.
    """
    delta, step = SPACING / 2**level, STEP / 2**level
    mean = float(law.counts @ law.variances + law.shifts.sum())  # of s^2
    far = math.sqrt(mean) + REACH * math.sqrt(float(law.variances.max()))
    count = math.ceil(math.asinh(far / SCALE) / delta) + STENCIL
    if count > MOST:
        return None
    s = SCALE * np.sinh((np.arange(count) + 0.5) * delta)
    none = np.zeros(1)
    one = _moved(np.sqrt(law.shifts[:1]), none, np.ones(1), none, delta, count)[0][:, 0]
    along = one[:, None] * law.steps[0]  # E V L a over the directions so far, at each s
    form = one * (law.steps[0] @ law.steps[0])
    for k in range(1, law.variances.size):
        sigma, others = math.sqrt(law.variances[k]), int(law.counts[k])
        rest = law.traces[k] / law.variances[k]
        if law.shifts[k] > 0.0:  # the direction of b
            middle, own = math.sqrt(law.shifts[k]), law.steps[k]
            a, weight = _normal(middle, sigma, step)
            same, once, twice = _moved(s, a, weight, a / middle, delta, count)
            form = same @ form + 2.0 * once @ (along @ own) + (own @ own) * (twice @ one)
            along = same @ along + (once @ one)[:, None] * own
            one = same @ one
            others, rest = others - 1, max(rest - (own @ own) / law.shifts[k], 0.0)
        if others > 0:  # the directions across it, of which only the length counts
            a, weight = _normal(0.0, sigma, step) if others == 1 else _chi(others, sigma, step)
            same, _, twice = _moved(s, a, weight, a, delta, count)
            form = same @ form + rest / others * (twice @ one)
            along, one = same @ along, same @ one
    return s, one, form


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
