"""Exact error of softmax attention on n Gaussian tokens: two functions of n and of the score's
standard deviation s; and its mean over Gaussian queries.
"""

from __future__ import annotations

import math
from math import ceil, erfc, exp, expm1, floor, log, log1p, pi, sqrt
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import torch
from numpy.polynomial import chebyshev
from torch import Tensor

from esscher.attention.head import Head
from esscher.errors.curve import ErrorCurve
from esscher.errors.scatter import in_threads
from esscher.inputs import as_counts, as_tensor
from esscher.measures.base import Measure
from esscher.measures.matrices import is_diagonal, product

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

# Without the interpreter's lock the caller can run parts in plain threads: unlike numba's own
# (parallel=True) they survive a fork and calls from several threads at once. Sums may be reordered:
# that is what vector units need.
compiled = numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})

COLUMNS = 4  # f1, f2, df1/dlog n, df2/dlog n

STEP = 0.25  # of the lattice that carries both u and tau
# from this s on the expectation over g is a sum over lattice nodes u, below it a sum over nodes g
WIDE = 0.5
# range of g that carries weight; a large n looks far to the right
REACH_LEFT, REACH_RIGHT = 10.0, 14.0
NEGLIGIBLE = 39.0  # exp(-39) = 1e-17
TINY = 1e-17  # the share of the sum so far at which the march over tau ends
HUGE = 700.0  # exp(700) is a number still: phi^-1 at n = 1

U_FIRST, U_LAST = -1120, 20  # u from -280 to 5, in steps
NODES_U = np.arange(U_FIRST, U_LAST + 1) * STEP
M1 = STEP * np.exp(NODES_U - np.exp(NODES_U))  # m_1 and m_2 with the rule's weight
M2 = STEP * np.exp(2 * NODES_U - np.exp(NODES_U))
M1_BELOW = np.cumsum(M1) - M1  # sum of M1 over the nodes before each one

STEP_G = 0.5  # error exp(-2 pi^2 / STEP_G^2) from the normal density
NODES_G = np.arange(-REACH_LEFT, 12.0 + STEP_G, STEP_G)
WEIGHTS_G = STEP_G * np.exp(-0.5 * NODES_G**2) / np.sqrt(2 * np.pi)


@compiled
def moments_narrow(tau: float, s: float, row: Floats) -> None:
    """M, N and log phi at one tau, for s < ``WIDE``.

    With A_k = E m_k(u), Stein's lemma gives N = A_2 + s^2 P, P = A_2 - 3 A_3 + A_4 >= -5/4 A_2.
    """
    missing = present = a2 = a3 = a4 = 0.0
    for k in range(NODES_G.size):
        y = exp(tau + s * NODES_G[k])
        lost = -expm1(-y)
        kept = exp(-y) if lost > 0.5 else 1.0 - lost
        missing += WEIGHTS_G[k] * lost
        present += WEIGHTS_G[k] * kept
        m2 = WEIGHTS_G[k] * kept * y * y
        a2 += m2
        a3 += m2 * y
        a4 += m2 * y * y
    row[0] = a2
    row[1] = a2 + s * s * (a2 - 3 * a3 + a4)
    row[2] = log1p(-missing) if missing < 0.5 else log(present)


@compiled
def fill_kernel(s: float, kernel: Floats) -> int:
    """What M, N and phi weigh m_k(u) by, over the offsets u - tau = x s; returns the column of x =
    0.

    With w the normal density and Q its survival function the rows are w/s, (x-s)^2 w/s, Q(x) and
    Q(-x).
    """
    left, right = ceil(REACH_LEFT * s / STEP), ceil(REACH_RIGHT * s / STEP)
    for j in range(-left, right + 1):
        x = j * STEP / s
        w = exp(-0.5 * x * x) / (sqrt(2 * pi) * s)
        tail = 0.5 * erfc(abs(x) / sqrt(2.0))
        c = j + left
        kernel[0, c] = w
        kernel[1, c] = (x - s) * (x - s) * w
        kernel[2, c] = tail if x > 0 else 1.0 - tail
        kernel[3, c] = tail if x <= 0 else 1.0 - tail
    return left


@compiled
def lowest_u(tau: float, s: float) -> float:
    """Where the integrand m_1(u) Q((u - tau)/s) of 1 - phi is left of everything that matters, or Q
    is 1.

    Right of tau the integrand is a normal density about tau + s^2 cut off at u = 0; left of tau it
    is e^u.
    """
    low = min(tau, 0.0)
    centre = low + s * s
    beyond = max(centre, 0.0)
    edge = centre - sqrt(2 * NEGLIGIBLE * s * s + beyond * beyond)
    if edge < low:
        edge = low + s * s / 2 - beyond * beyond / (2 * s * s) - NEGLIGIBLE
    return max(edge, tau - REACH_LEFT * s)


@compiled
def moments_wide(i: int, s: float, kernel: Floats, centre: int, row: Floats) -> None:
    """M, N and log phi at tau = i ``STEP``, for s >= ``WIDE``.

    Integration by parts bounds the window on the right: 1 - phi = int m_1(u) Q((u - tau)/s) du, and
    phi with 1 - Q.
    """
    first = max(ceil(lowest_u(i * STEP, s) / STEP), i - centre)
    assert first >= U_FIRST
    last = min(U_LAST, i + ceil(REACH_RIGHT * s / STEP))
    c = centre - i
    m = v = missing = present = 0.0
    for k in range(first, last + 1):
        m1, m2 = M1[k - U_FIRST], M2[k - U_FIRST]
        m += m2 * kernel[0, k + c]
        v += m2 * kernel[1, k + c]
        missing += m1 * kernel[2, k + c]
        present += m1 * kernel[3, k + c]
    # there Q is 1, or it does not matter
    missing += M1_BELOW[first - U_FIRST] * kernel[2, first + c]
    row[0], row[1] = m, v
    row[2] = log1p(-missing) if missing < 0.5 else log(present)


@compiled
def add_node(n: float, s: float, row: Floats, total: Floats) -> bool:
    """Add the integrands at one tau to ``total``; true while the node still matters."""
    m, v, log_phi = row
    one = n * exp((n - 1) * log_phi)
    two = n * s * s * m * m * exp(min((n - 2) * log_phi, HUGE))
    f1, f2 = one * v + (n - 1) * two, one * m
    total[0] += f1
    total[1] += f2
    total[2] += one * v * (1 + n * log_phi) + two * (2 * n - 1 + n * (n - 1) * log_phi)
    total[3] += f2 * (1 + n * log_phi)
    return bool(f1 > TINY * total[0] or f2 > TINY * total[1])


@compiled
def stride(n: float, s: float) -> int:
    """Lattice steps between the nodes tau: beyond freezing phi^n varies on the scale s / sqrt(2 log
    n) > 1.
    """
    return max(1, floor(s / (1 + sqrt(2 * log(n)))))


@compiled
def peak(n: float, s: float) -> float:
    """The tau about which the integrands live: n (1 - phi) is about 1 there."""
    freezing = sqrt(2 * log(n))
    return -log(n) - s * s / 2 if s < freezing else -s * freezing


@compiled
def integrate_pairs(ns: Floats, ss: Floats, out: Floats) -> None:
    """``COLUMNS`` for each pair (n, s), into the rows of ``out``; runs of equal s share M, N and
    phi.
    """
    kernel = np.empty((4, ceil((REACH_LEFT + REACH_RIGHT) * ss.max() / STEP) + 3))
    lowest, highest = (
        -ceil((REACH_RIGHT * ss.max() + 160) / STEP),
        ceil((REACH_LEFT * ss.max() + 60) / STEP),
    )
    rows = np.empty((highest - lowest + 1, 3))
    known = np.zeros(rows.shape[0], dtype=np.bool_)
    centre, last_s = 0, -1.0
    for pair in range(ss.size):
        n, s, total = ns[pair], ss[pair], out[pair]
        if s != last_s:
            last_s = s
            known[:] = False
            if s >= WIDE:
                centre = fill_kernel(s, kernel)
        total[:] = 0.0
        hop = stride(n, s)
        begin = hop * round(peak(n, s) / (hop * STEP))
        for direction in (-1, 1):
            i, matters = begin + min(direction, 0) * hop, True
            while matters:
                assert lowest <= i <= highest
                row = rows[i - lowest]
                if not known[i - lowest]:
                    known[i - lowest] = True
                    if s < WIDE:
                        moments_narrow(i * STEP, s, row)
                    else:
                        moments_wide(i, s, kernel, centre, row)
                matters = add_node(n, s, row, total)
                i += direction * hop
        total *= hop * STEP


# ---- The same for arrays of n and s.

S_MAX = 100.0  # largest score standard deviation taken


class GaussianError(NamedTuple):
    """f1, f2 and their slopes in log n, n read as a real number; all of one shape."""

    f1: Floats
    f2: Floats
    df1_dlogn: Floats
    df2_dlogn: Floats


def gaussian_error(n: Any, s: Any) -> tuple[Any, Any]:
    """Mean squared error of attention on n Gaussian tokens, along the tilt (f1) and across it (f2).

        f1(n, s) = E (sum_j p_j (g_j - s))^2,
        f2(n, s) = E sum_j p_j^2,
        p_j proportional to exp(s g_j),

    g_1, ..., g_n independent standard normal. For tokens N(m, Sigma), tilt theta, s = sqrt(theta^T
    Sigma theta) and u = Sigma^(1/2) theta / s, the error Gamma_n - Gamma of the head has second
    moment V Sigma^(1/2) [f1 u u^T + f2 (I - u u^T)] Sigma^(1/2) V^T and mean -f2 V Sigma theta, in
    every dimension.

    ``n``: numbers of tokens, whole, from 1 to 2^53; ``s``: standard deviations of the score, from 0
    to ``S_MAX``; they broadcast. Numpy numbers or arrays in float64, relative error below 1e-12.
    """
    value = gaussian_error_slopes(n, s)
    return value.f1[()], value.f2[()]


def gaussian_error_slopes(n: Any, s: Any) -> GaussianError:
    """``gaussian_error`` with its slopes in log n, from the same quadrature, as numpy arrays.

    The slopes are right to about 1e-11 of f1 and f2 themselves.
    """
    counts, deviations = _broadcast(n, s)
    # integrate every pair, in threads where there are many; pairs of equal s share their work
    order = np.argsort(deviations, axis=None, kind="stable")[::-1]
    flat_n, flat_s = counts.ravel()[order], deviations.ravel()[order]
    result = np.empty((order.size, COLUMNS))
    workers = torch.get_num_threads()
    parts = 8 * workers if order.size >= 32 * workers and workers > 1 else 1
    edges = np.linspace(0, order.size, parts + 1).astype(int)

    def task(i: int) -> None:
        own = slice(edges[i], edges[i + 1])
        integrate_pairs(flat_n[own], flat_s[own], result[own])

    in_threads(task, range(parts if order.size else 0))
    columns = np.empty((4, order.size))
    columns[:, order] = result.T
    # rounding must not leave the range of sum_j p_j^2
    columns[1] = np.clip(columns[1], 1 / counts.ravel(), 1.0)
    return GaussianError(*(column.reshape(deviations.shape) for column in columns))


def _broadcast(n: Any, s: Any) -> tuple[Floats, Floats]:
    """Valid counts and standard deviations in float64, expanded to their common shape."""
    raw = np.asarray(n.tolist() if isinstance(n, Tensor) else n)  # bfloat16 has no array
    counts = as_counts(raw.ravel(), "n").astype(np.float64).reshape(raw.shape)
    deviations = as_tensor(s, "s").detach().double().cpu().numpy()
    bad = (deviations < 0) | (deviations > S_MAX)
    if bad.any():
        raise ValueError(
            f"s: expected standard deviations of the score from 0 to {S_MAX:g}, got"
            f" {deviations[bad][0]:g}; clamp s or raise the temperature"
        )
    counts, deviations = np.broadcast_arrays(counts, deviations)
    return counts, deviations


# ---- Gaussian queries, integrated: no query is drawn. The error at a query depends on s and on a^T
# G a / s^2, where a = L^T (A x + tilt bias) is the score's vector, s = |a|, L L^T the covariance of
# the tokens and G = L^T V^T V L.

STANDS, UNSURE = 1e-11, 1e-6  # relative change that ends the halving, and that the last may have
HALVINGS = 7
# f1/s^2 and f2 beyond S_MAX: polynomials in 1/s through values from here to S_MAX
FROZEN, DEGREE = 20.0, 10
EXTRAPOLATED = 1e-9  # their relative error for n up to 2^53


class Scores(NamedTuple):
    """The law of the score's vector a, Gaussian, in its eigenbasis."""

    variances: Floats  # of each direction, rising
    means: Floats
    value: Floats  # columns of V L, (d_out, directions)

    def delta(self) -> float:
        """E exp(s^2) (tr G + a^T G a), lim n * MSE; infinite where a variance is 1/2 or more."""
        q, squares = 1.0 - 2.0 * self.variances, (self.value**2).sum(axis=0)
        if (q <= 0.0).any():
            return math.inf
        log_size = float((-0.5 * np.log(q) + self.means**2 / q).sum())
        step = self.value @ (self.means / q)
        form = float((squares * (1.0 + self.variances / q)).sum() + step @ step)
        return math.exp(log_size) * form if log_size < 700.0 else math.inf


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
    order = variances.argsort()
    lam, b, columns = (x[..., order].cpu().numpy() for x in (variances, offset, value))
    lam = np.where(lam > 1e-14 * lam.max(), lam, 0.0)
    law = Scores(lam, np.where(b**2 > 1e-32 * lam, b, 0.0), columns)  # below is rounding
    parts, accuracy = _integrate(law, n)
    if not accuracy < UNSURE:  # or NaN
        return None
    mse, dmse, sum_p2 = parts
    with np.errstate(divide="ignore", invalid="ignore"):  # an error of exactly 0 has no slope
        slope = 0.5 * dmse / mse
    cov = measure.cov.double()
    centre = head.values((measure.mean.double() + head.tilt(queries.mean.double()) @ cov)[None])[0]
    moved = product(product(head.V.double(), cov), product(A, queries.root))
    return ErrorCurve(
        n=n,
        rms=np.sqrt(mse),
        kind="exact",
        scale=math.hypot(float(centre.norm()), float(moved.norm())),
        slope=slope,
        effective_tokens=1.0 / sum_p2,
        delta=law.delta(),
        accuracy=accuracy,
        origin=(
            "exact, Gaussian tokens: f1 and f2 of the score's standard deviation; the law of"
            " queries integrated"
        ),
    )


def _integrate(law: Scores, n: Counts) -> tuple[Floats, float]:
    """Mean squared error, its derivative in log n and E sum_j p_j^2 at each n, and their relative
    accuracy: all steps are halved until the numbers stand.
    """
    trace = float((law.value**2).sum())
    if not law.variances.any():  # every query has the same s
        s, step = np.sqrt((law.means**2).sum(keepdims=True)), law.value @ law.means
        return _sums(s, np.ones(1), np.array([step @ step]), trace, n), 1e-12
    found, accuracy = np.zeros((3, n.size)), math.inf
    for level in range(HALVINGS + 1):
        nodes = _nodes(law, level)
        if nodes is None:
            break
        s, one, form = nodes
        before, found = found, _sums(s, one, form, trace, n)
        with np.errstate(divide="ignore", invalid="ignore"):
            change = np.where(before == found, 0.0, np.abs(before / found - 1.0))[[0, 2]]
        accuracy = max(float(change.max()), abs(float(one.sum()) - 1.0))
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
    known = gaussian_error_slopes(n[None, :], s[inside][:, None])
    f1[inside], f2[inside], df1[inside], df2[inside] = known
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
    fits = [
        (chebyshev.chebfit(points, values / nodes[:, None] ** power, DEGREE), power)
        for values, power in zip(at, (2, 0, 1, 0), strict=True)
    ]
    f1, f2, df1, df2 = (chebyshev.chebval(x, fit).T * s[:, None] ** power for fit, power in fits)
    return f1, f2, df1, df2


# ---- Nodes for the law of s and a^T G a: one direction of the score's vector after the other takes
# s to sqrt(s^2 + a^2), and its weight is shared out among the nodes nearby by interpolation.

SCALE = 2.0  # nodes are evenly spaced below it and geometric above
STENCIL = 16
REACH = 14.0  # deviations to which the rules reach; what is left weighs exp(-98)
SPACING, RULE_STEP = 0.08, 0.8  # of nodes, and of the rules in deviations, at level 0
MOST = 3000  # nodes; more are not worth their memory


def _nodes(law: Scores, level: int) -> tuple[Floats, Floats, Floats] | None:
    """s and weights of both signs, ``one`` and ``form``: sum(one h(s)) = E h(s), sum(form h(s)) =
    E h(s) a^T G a. Each ``level`` halves all steps; None where that would take more than ``MOST``.
    """
    delta, step = SPACING / 2**level, RULE_STEP / 2**level
    mean = float(law.variances.sum() + (law.means**2).sum())  # of s^2
    far = math.sqrt(mean) + REACH * math.sqrt(float(law.variances.max()))
    count = math.ceil(math.asinh(far / SCALE) / delta) + STENCIL
    if count > MOST:
        return None
    s, none = SCALE * np.sinh((np.arange(count) + 0.5) * delta), np.zeros(1)
    fixed = np.where(law.variances == 0.0, law.means, 0.0)
    own = law.value @ fixed if law.means.any() else np.zeros(0)  # a centred law takes no steps
    start = np.sqrt((fixed**2).sum(keepdims=True))
    one = _moved(start, none, np.ones(1), none, delta, count)[0][:, 0]
    along, form = one[:, None] * own, one * (own @ own)  # along: E V L a so far, at each s
    last = (0.0, 0.0)
    for i in np.flatnonzero(law.variances).tolist():
        moments = float(law.means[i]), math.sqrt(law.variances[i])
        if moments != last:
            a, weight = _normal(*moments, step)
            same, once, twice = _moved(s, a, weight, a, delta, count)
            last = moments
        own = law.value[:, i]
        form = same @ form + (own @ own) * (twice @ one)
        if along.size:
            form += 2.0 * (once @ (along @ own))
            along = same @ along + (once @ one)[:, None] * own
        one = same @ one
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
