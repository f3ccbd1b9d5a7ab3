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


# ---- The law over Gaussian queries of what the error at a query depends on: the score's
# deviation s and a^T G a.

LARGEST = 1e90  # its cube, which the contour takes, is a number still


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

    def growth(self) -> tuple[float, float]:
        """E exp(s^2) and E exp(s^2) a^T G a; infinite where they are."""
        q = 1.0 - 2.0 * self.values
        if (q <= 0.0).any():
            return math.inf, math.inf
        log = self.floor + float((-0.5 * self.counts * np.log(q) + self.shifts / q).sum())
        size, r = math.exp(log) if log < 700.0 else math.inf, np.append(1.0 / q, 1.0)
        return size, size * float(r[:-1] @ self.traces + r @ self.cross @ r)


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
    law = _grouped(*(x.cpu().numpy() for x in (values, offset, value, size)))
    return law, float(size.sum()), is_multiple_of_identity(gram, 1e-12)


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


# ---- Nodes for the law of s and a^T G a: one direction of the score's vector after the other.

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


def _nodes(law: ScoreLaw, level: int) -> Nodes | None:
    """The law as weights of both signs; each ``level`` halves all steps. None where that would take
    more than ``MOST`` nodes.
    """
    delta, step = SPACING / 2**level, STEP / 2**level
    mean = law.floor + float(law.counts @ law.values + law.shifts.sum())  # of s^2
    far = math.sqrt(mean) + REACH * math.sqrt(float(law.values.max()))
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
            middle = math.sqrt(shift)
            a, weight = _normal(middle, sigma, step)
            same, once, twice = _moved(s, a, weight, a / middle, delta, count)
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


# ---- The exact error averaged over Gaussian queries, integrated: no query is drawn.

Counts = npt.NDArray[np.int64]

HALVINGS = 7
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
    parts, accuracy = _integrate(law, trace, n)
    if not accuracy < UNSURE:  # or NaN
        return None
    mse, dmse, sum_p2 = parts
    with np.errstate(divide="ignore", invalid="ignore"):  # an error of exactly 0 has no slope
        slope = 0.5 * dmse / mse
    cov = measure.cov.double()
    centre = head.values((measure.mean.double() + head.tilt(queries.mean.double()) @ cov)[None])[0]
    spread = product(product(head.V.double(), cov), product(head.A.double(), queries.root))
    size, form = law.growth()
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
    found, accuracy = np.zeros((3, n.size)), math.inf
    for level in range(HALVINGS + 1):
        nodes = _nodes(law, level)
        if nodes is None:
            break
        before, found = found, _sums(nodes, trace, n)
        change = relative_change(before[[0, 2]], found[[0, 2]])
        beyond = float(np.abs(nodes.one[nodes.s > S_MAX]).sum()) > 1e-12
        accuracy = max(change, abs(float(nodes.one.sum()) - 1.0))
        if accuracy < STANDS:
            break
        accuracy = max(accuracy, EXTRAPOLATED if beyond else 0.0)
    return found, max(1e-12, accuracy)


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
    quantile is not known: unequal variances.
    """
    if law.values.size > 1:
        return None
    t = law.floor
    if law.values.size == 1:
        top = float(law.values[0])
        t += top * float(scipy.stats.ncx2.ppf(LEVEL, law.counts[0], law.shifts[0] / top))
    if not math.isfinite(t):
        return None
    nodes = Nodes(np.array([math.sqrt(t)]), np.ones(1), np.array([t * per_direction]))
    return np.asarray(np.sqrt(_sums(nodes, trace, n)[0]))
