"""A law of queries for an exact curve: as weighted rows where that is exact, drawn with its
standard error where it is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import scipy.stats
import torch
from numpy.polynomial import chebyshev
from scipy.interpolate import CubicSpline
from torch import Tensor

from esscher.attention.head import Head
from esscher.errors.curve import ErrorCurve, QueryErrors
from esscher.errors.gaussian import S_MAX, gaussian_error_slopes
from esscher.measures.base import Measure
from esscher.measures.line import graded
from esscher.measures.matrices import is_diagonal, product
from esscher.measures.radial import radial

Floats = npt.NDArray[np.float64]

RADII = 24  # nodes of a radius, doubled until the curve stands
STANDS, UNSURE = 1e-11, 1e-6  # relative change that ends the doubling, and that the last may have
DOUBLINGS = 4
LEVEL = 0.95


@dataclass(frozen=True)
class QueryRows:
    """Queries and weights whose weighted mean error is the law's, for a head ``head`` with the same
    mean error.

    ``quantile``: the last row, of weight 0, is a query whose error is the 95 % quantile.
    """

    head: Head
    x: Tensor
    weights: Floats | None
    quantile: bool


def _query_rows(
    head: Head, measure: Measure, queries: Measure, nodes: int = RADII
) -> QueryRows | None:
    """The law of queries as finitely many rows, where that is possible; None where it is not.

    Pools of equal weights and small Rademacher cubes: their points. Tokens and queries both
    rotation-invariant and A a multiple of an orthogonal matrix: the error depends on |x| and on |V
    u|^2, u uniform and independent of |x|, so V may be replaced by |V|_F I / sqrt(d) and the
    direction by any; the radius has a Gauss-Jacobi rule of ``nodes``. A uniform law on the line is
    a ball.
    """
    points, turned = queries.points(), queries.as_rotational()
    if points is not None:
        return QueryRows(head, points, None, False)
    # the error is analytic in x^2 on the whole line
    entire = measure.is_even and measure.subgaussian_root is not None
    line = measure.dim == queries.dim == 1 and entire and head.tilt_bias is None
    if turned is None or not (line or _turns_alike(head, measure)):
        return None
    radii, weights = turned.lengths(nodes)
    first = torch.eye(1, queries.dim, dtype=torch.float64, device=queries.device)
    quantile = turned.quantile(np.array(LEVEL))
    size = float(head.V.double().norm()) / math.sqrt(head.dim)
    V = size * torch.eye(head.dim, dtype=torch.float64, device=measure.device)
    gram = product(head.V.double().T, head.V.double())
    alike = bool(
        torch.allclose(gram, size**2 * torch.eye(head.dim).to(gram), rtol=0, atol=1e-12 * size**2)
    )
    rows = torch.from_numpy(np.append(radii, quantile))[:, None].to(first) * first
    even = Head(head.A, V) if not line else head
    return QueryRows(even, rows, np.append(weights, 0.0), alike)


def _turns_alike(head: Head, measure: Measure) -> bool:
    """The law of the tokens is rotation-invariant, A is a multiple of an orthogonal matrix, and
    there are no biases.
    """
    if measure.as_rotational() is None or head.tilt_bias is not None or head.value_bias is not None:
        return False
    A = head.A.double()
    if A.shape[0] != A.shape[1]:
        return False
    gram = product(A.T, A)
    size = float(gram.diagonal().mean())
    return bool(
        torch.allclose(gram, size * torch.eye(A.shape[0]).to(gram), rtol=0, atol=1e-13 * size)
    )


def integrated(
    over: Callable[..., ErrorCurve], head: Head, measure: Measure, queries: Measure
) -> ErrorCurve | None:
    """The curve over a law of queries that is finitely many rows, ``over`` giving that of rows;
    None where it is not, or where its rule of radii does not converge.
    """
    rows = _query_rows(head, measure, queries)
    if rows is None:
        return None
    curve, change = over(rows.head, rows.x.to(measure.device), rows.weights), 0.0
    origin = f"{curve.origin}; the law of queries integrated"
    if rows.weights is None:
        return replace(curve, origin=origin)
    if len(rows.weights) > 2:  # more radii than one, and the quantile's
        for doubled in range(1, DOUBLINGS + 1):
            before, rows = curve.rms, _query_rows(head, measure, queries, RADII << doubled)
            assert rows is not None
            curve = over(rows.head, rows.x.to(measure.device), rows.weights)
            change = relative_change(before, curve.rms)
            if change < STANDS:
                break
    if not change < UNSURE:
        return None
    assert curve.queries is not None
    return replace(
        curve,
        # nodes of a rule are not queries and are left out
        q95=np.sqrt(curve.queries.mse[-1]) if rows.quantile else None,
        queries=None,
        accuracy=max(curve.accuracy, change),
        origin=origin,
    )


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

    @property
    def mean(self) -> float:
        """E s^2 - floor."""
        return float(self.counts @ self.values + self.shifts.sum())

    @property
    def deviation(self) -> float:
        """Standard deviation of s^2."""
        return math.sqrt(
            float(2.0 * self.counts @ self.values**2 + 4.0 * self.shifts @ self.values)
        )

    def growth(self, power: float) -> tuple[float, float]:
        """E exp(power s^2) and E exp(power s^2) a^T G a; infinite where they are."""
        q = 1.0 - 2.0 * power * self.values
        if (q <= 0.0).any():
            return math.inf, math.inf
        log = power * self.floor + float(
            (-0.5 * self.counts * np.log(q) + power * self.shifts / q).sum()
        )
        size = math.exp(log) if log < 700.0 else math.inf
        return size, size * float(self._form(1.0 / q))

    def densities(self, t: Floats) -> tuple[Floats, Floats, Floats]:
        """Logarithms of a scale, and over it the density of s^2 - floor at t and that density times
        E[a^T G a | t]; no b_k but of variance 0.
        """
        assert not self.shifts.any()
        top = self.values.max()
        gap = 1.0 - self.values / top
        mu = self._saddle(t, gap)
        q = gap + 2.0 * mu[:, None] * self.values
        p = mu - 0.5 / top
        log_scale = p * t - 0.5 * np.log(q) @ self.counts
        curvature = 2.0 * (self.values / q) ** 2 @ self.counts
        step = np.minimum(0.1, 0.5 / np.sqrt(4.0 * mu**2 * curvature))
        points = int(np.ceil((np.sqrt(46.0 / (mu * t)) / step).max())) + 1
        one, form = np.zeros_like(t), np.zeros_like(t)
        for k in range(points):
            turn = 1.0 + 1j * k * step
            at = mu * turn**2
            z = gap + 2.0 * at[:, None] * self.values
            log = (at - 0.5 / top) * t - 0.5 * np.log(z) @ self.counts
            share = (
                (0.5 if k == 0 else 1.0) * step * 2.0 * mu / np.pi * turn * np.exp(log - log_scale)
            )
            one += share.real
            form += (share * self._form(1.0 / z)).real
        return log_scale, one, form

    def _form(self, r: Any) -> Any:
        """sum G_kk lambda_k r_k + sum G_kl b_k b_l r_k r_l."""
        linear = r @ self.traces
        if not self.cross.any():
            return linear
        full = np.concatenate([r, np.ones((*r.shape[:-1], 1))], axis=-1)
        return linear + ((full @ self.cross) * full).sum(axis=-1)

    def _saddle(self, t: Floats, gap: Floats) -> Floats:
        """mu > 0 with sum_k lambda_k / q_k = t, by bisection of its logarithm: a few digits
        suffice.
        """
        low, high = np.log(0.25 / t), np.log(2.0 * float(self.counts.sum()) / t + 1e-300)
        for _ in range(40):
            middle = 0.5 * (low + high)
            q = gap + 2.0 * np.exp(middle)[:, None] * self.values
            above = self.values / q @ self.counts > t
            low, high = np.where(above, middle, low), np.where(above, high, middle)
        return np.asarray(np.exp(0.5 * (low + high)), np.float64)


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
    even = size.mean() * torch.eye(size.numel(), dtype=torch.float64, device=size.device)
    alike = float((gram - even).abs().max()) <= 1e-12 * float(size.mean())
    law = _grouped(
        values.cpu().numpy(), offset.cpu().numpy(), value.cpu().numpy(), size.cpu().numpy()
    )
    return law, float(size.sum()), alike


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


# ---- The law of s and a^T G a over Gaussian queries whose score's vector a has a mean: one
# direction after the other, without a density.

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


# ---- The exact error averaged over Gaussian queries, integrated: no query is drawn.

Counts = npt.NDArray[np.int64]

GAUSSIAN_STANDS = 1e-11  # relative change at which the rule in log s is no longer halved
HALVINGS = 7
# deviations beyond the root mean square of s to which the rule reaches; what is left weighs
# exp(-98)
OUTER = 14.0
INNER = 9.0  # deviations below it
NEAR_ZERO = 1e-17  # mass times s^2 left out at s = 0, where f1 and f2 are constant up to s^2
NEGLIGIBLE = 1e-45  # weight of a node that is not evaluated
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
        if change < GAUSSIAN_STANDS:
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
        if accuracy < GAUSSIAN_STANDS:
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


# ---- How far a token's value lies from the limit, c = V y + v0 - Gamma, under the tilted law:
# nodes of |c|, and c's mean there.

VALUE_SIZE_REACH = 12.0  # deviations
VALUE_SIZE_HALVINGS = 40  # of the panels towards |c| = 0
ALIKE = 1e-10  # relative spread of eigenvalues taken for equal


@dataclass(frozen=True)
class Sizes:
    """Under the tilted law: |c| (N,), logarithms of weights (N,), the mean of c given the node (N,
    d).
    """

    size: Tensor
    log_weights: Tensor
    centre: Tensor


def tilted_sizes(head: Head, measure: Measure, theta: Tensor, limit: Tensor) -> Sizes | None:
    """At one tilt (d,); None where neither the law nor the head is of a kind that leaves |c|
    one-dimensional.
    """
    parts, rotational = measure.gaussian_parts(), measure.as_rotational()
    if parts is not None:
        return _of_gaussians(head, [(weight, law) for weight, law in parts], theta, limit)
    if rotational is not None and not _keeps_angles(head.V.double()):
        return None
    if rotational is None and measure.as_pool() is None and measure.points() is None:
        return None
    lines = measure.along(theta)
    if lines is None:
        return None
    scores, weights = (
        torch.cat([line.scores for line in lines]),
        torch.cat([line.log_weights for line in lines]),
    )
    centre = head.values(torch.cat([line.means for line in lines])) - limit
    extra = torch.cat([line.extra(head.V.double()) for line in lines])
    return Sizes(
        (centre.square().sum(1) + extra).sqrt(), torch.log_softmax(scores + weights, 0), centre
    )


def drawn_sizes(head: Head, tokens: Tensor, theta: Tensor) -> Sizes:
    """Of given tokens, equally likely; their own limit is the limit."""
    weights = torch.log_softmax(tokens @ theta, 0)
    values = head.values(tokens)
    centre = values - values[0]
    centre = centre - weights.exp() @ centre
    return Sizes(centre.norm(dim=1), weights, centre)


def _keeps_angles(V: Tensor) -> bool:
    """V^T V is a multiple of the identity: |V y| is that of |y|."""
    gram = product(V.T, V)
    size = float(gram.diagonal().mean())
    return bool((gram - size * torch.eye(len(gram)).to(gram)).abs().max() <= ALIKE * size)


def _of_gaussians(
    head: Head, parts: list[tuple[float, Measure]], theta: Tensor, limit: Tensor
) -> Sizes | None:
    V, found, logs = head.V.double(), [], []
    for weight, law in parts:
        spread = product(V, law.root)
        values, basis = torch.linalg.eigh(product(spread, spread.T))
        values = torch.where(values > ALIKE * values.max(), values, 0.0)
        apart = (
            head.values(law.tilted_mean(theta)[None])[0] - limit
            if len(parts) > 1
            else torch.zeros_like(limit)
        )
        used = values > 0
        if not bool(used.any()):
            nodes = Sizes(apart.norm()[None], apart.new_zeros(1), apart[None])
        elif float(values.max()) - float(values[used].min()) <= ALIKE * float(values.max()):
            nodes = _noncentral(apart, basis[:, used], math.sqrt(float(values[used].mean())))
        elif len(parts) == 1:
            nodes = _central(values[used].cpu().numpy(), limit)
        else:
            return None
        found.append(nodes)
        logs.append(math.log(weight) + float(law.log_laplace(theta)))
    shares = torch.log_softmax(torch.tensor(logs, dtype=torch.float64), 0).tolist()
    weights = torch.cat(
        [nodes.log_weights + share for nodes, share in zip(found, shares, strict=True)]
    )
    return Sizes(
        torch.cat([nodes.size for nodes in found]),
        weights,
        torch.cat([nodes.centre for nodes in found]),
    )


def _noncentral(apart: Tensor, span: Tensor, sigma: float) -> Sizes:
    """N(apart, sigma^2) on the span, fixed across it."""
    r, inside = span.shape[1], span @ (span.T @ apart)
    alpha = float(inside.norm())
    # the density of rho has its bell near sqrt(alpha^2 + (r - 1) sigma^2), at most sigma wide
    bell = math.hypot(alpha, math.sqrt(r - 1) * sigma)
    rho, lengths = (
        x.to(apart)
        for x in graded(
            max(0.0, bell - VALUE_SIZE_REACH * sigma),
            bell + VALUE_SIZE_REACH * sigma,
            sigma,
            VALUE_SIZE_HALVINGS,
        )
    )
    at = radial(r / 2, (rho * alpha / sigma**2).square())
    log_density = (
        (r - 1) * rho.log() - (rho.square() + alpha * alpha) / (2 * sigma * sigma) + at.log
    )
    along = rho.square() / sigma**2 * at.ratio  # rho B(rho alpha / sigma^2) / alpha
    across = apart - inside
    size = (rho.square() + across.square().sum()).sqrt()
    return Sizes(
        size, torch.log_softmax(lengths.log() + log_density, 0), across + along[:, None] * inside
    )


def _central(values: np.ndarray, limit: Tensor) -> Sizes:
    """N(0, C), ``values`` the eigenvalues of C above 0."""
    levels, counts = np.unique(values, return_counts=True)
    none = np.zeros_like(levels)
    law = ScoreLaw(
        levels,
        counts.astype(np.float64),
        none,
        none,
        np.zeros((levels.size + 1, levels.size + 1)),
        0.0,
    )
    bell, unit = math.sqrt(law.mean), math.sqrt(float(levels.max()))
    rho, lengths = graded(
        max(0.0, bell - VALUE_SIZE_REACH * unit),
        bell + VALUE_SIZE_REACH * unit,
        unit,
        VALUE_SIZE_HALVINGS,
    )
    log_scale, density, _ = law.densities((rho**2).numpy())
    log_density = torch.from_numpy(log_scale + np.log(np.maximum(density, 1e-300))) + rho.log()
    return Sizes(
        rho.to(limit),
        torch.log_softmax(lengths.log() + log_density, 0).to(limit),
        limit.new_zeros(len(rho), len(limit)),
    )
