"""exact_curve: the exact error of a head on n tokens of a law, for every n at once. No sampling, no
variance. The integral is evaluated in esscher.errors.integral, of Gaussian tokens in
esscher.errors.gaussian.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.attention.head import Head, check_pair
from esscher.attention.limit import limit, second_tilt
from esscher.errors.curve import ErrorCurve, QueryErrors, concatenate, rms_stderr
from esscher.errors.gaussian import gaussian_error_slopes, gaussian_queries_curve
from esscher.errors.integral import error_from_nodes, line_nodes
from esscher.errors.keep_curve import LawRule
from esscher.errors.pool_curve import exact_pool_curve, pool_stderr
from esscher.inputs import as_count, as_counts, as_tensor, finite_result
from esscher.keep.rule import parse
from esscher.measures.base import Measure
from esscher.measures.rotational import Rotational

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

CHEBYSHEV = 33  # tilts at which many queries' f1 and f2 are computed, then interpolated in between
INTERPOLATED = 1e-10  # relative accuracy the interpolation must reach


@torch.no_grad()
def exact_curve(
    head: Head,
    measure: Measure,
    queries: Any,
    n: Any = None,
    *,
    keep: Any = None,
    context: Any = None,
    details: bool = False,
    pool_size: int = 1 << 15,
    seed: int = 0,
    draws: int = 256,
) -> ErrorCurve:
    """E||Gamma_n - Gamma||^2 at each n, averaged over ``queries``, rows or a law: ``.rms`` is its
    root.

    Formula: esscher.errors.integral. Gaussian tokens: through ``gaussian_error``. Sphere, ball,
    pools, small Rademacher cubes, one-dimensional laws and mixtures of these: one-dimensional
    quadrature along each query's tilt. Any other law: exactly for a stated pool of ``pool_size``
    tokens drawn from it with ``seed``, and then ``kind`` is "pool". Per-query values are in
    ``.queries``; ``details`` adds each query's bias and, for Gaussian tokens and those on the
    sphere and in the ball, the second moment and the covariance of its error.

    ``queries`` may be a measure. Its law is integrated for Gaussian queries on Gaussian tokens,
    pools and small Rademacher cubes; of any other law, and where that integral would not be right
    to 1e-6, ``draws`` queries are drawn with ``seed``, and ``.query_stderr`` says what that leaves
    uncertain.

    ``keep``: a rule of ``es.keep`` or its text. The error is then that of the n keys it keeps on
    average of ``context`` independent tokens (one number, or one for each n): a mean over contexts
    drawn from the law. ``context`` None: n keys are kept of a context without end ("random", which
    is the curve above, or "neyman" of pools, of Gaussian tokens, and of spheres and balls where V^T
    V is a multiple of the identity). Formulas: esscher.errors.keep_curve.
    """
    check_pair(head, measure)
    size = as_count(pool_size, "pool_size")
    if keep is None and context is not None:
        raise ValueError("context: only a keep rule has one; give keep too, or leave context out")
    kept = None if keep is None else LawRule.of(parse(keep), n, context)
    counts = as_counts(n, "n") if kept is None else kept.n

    def over(x: Tensor) -> ErrorCurve:
        # outside its strip a law has no limit: refuse before any work
        measure.log_laplace(head.tilt(x))
        if kept is None or kept.plain:
            return _over_rows(head, measure, x, counts, details, size, seed)
        return kept.curve(head, measure, x, details, seed)

    if not isinstance(queries, Measure):
        x = as_tensor(queries, "queries", ndim=2, last=head.dim_query).double().to(measure.device)
        if x.shape[0] == 0:
            raise ValueError("queries: expected at least one row, got none")
        return over(x)
    if details:
        raise ValueError(
            "details: expected queries as rows, got a law of queries; draw rows with"
            " queries.sample(m)"
        )
    if queries.dim != head.dim_query:
        raise ValueError(
            f"queries: expected a law of dimension {head.dim_query}, the head's queries, got"
            f" {queries.dim}"
        )
    if kept is None or kept.plain:
        if measure.is_gaussian and queries.is_gaussian:
            known = gaussian_queries_curve(head, measure, queries, counts)
            if known is not None:
                return known
        pool = queries.as_pool()
        if pool is not None:
            curve = over(pool.tokens.double().to(measure.device))
            return replace(curve, origin=f"{curve.origin}; the law of queries integrated")
    x = queries.sample(as_count(draws, "draws"), torch.Generator().manual_seed(seed))
    curve = over(x.double().to(measure.device))
    assert curve.queries is not None
    origin = f"{curve.origin}; mean over {len(x)} queries drawn from their law (seed {seed})"
    return replace(curve, query_stderr=rms_stderr(curve.queries.mse), origin=origin)


def _over_rows(
    head: Head,
    measure: Measure,
    x: Tensor,
    counts: Counts,
    details: bool,
    pool_size: int,
    seed: int,
) -> ErrorCurve:
    """``pool_size`` and ``seed``: of the pool that stands for a law without nodes along a tilt."""
    pool, law = measure.as_pool(), type(measure).__name__
    if measure.is_gaussian:
        errors = _gaussian(head, measure, x, counts, details)
        origin = "exact, Gaussian tokens: f1 and f2 of the score's standard deviation"
    elif isinstance(measure, Rotational):
        errors = _rotational(head, measure, x, counts, details)
        origin = f"exact, {law} tokens: quadrature over the cosine"
    elif pool is not None:
        tokens = pool.tokens.double()
        q, k, v = head.queries(x), head.keys(tokens), head.values(tokens)
        return exact_pool_curve(q, k, v, counts, scale=1.0, details=details)
    else:
        parts = []
        for theta in head.tilt(x).double():
            lines = measure.along(theta)
            if lines is None:
                return _through_pool(head, measure, x, counts, details, pool_size, seed)
            score, weight, value, extra = line_nodes(head, lines)
            parts.append(
                error_from_nodes(score[None], weight, value, extra, counts, details=details)
            )
        errors = replace(
            concatenate(parts),
            limit=limit(head, measure)(x).cpu().numpy(),
            delta=delta_trace(head, measure, x).cpu().numpy(),
        )
        origin = f"exact, {law} tokens: quadrature along each query's tilt"
    return ErrorCurve.from_queries(counts, errors, kind="exact", origin=origin)


def _two_directions(
    head: Head,
    measure: Measure,
    x: Tensor,
    details: bool,
    w: Tensor,
    total: Tensor,
    columns: tuple[Floats, ...],
    accuracy: float,
) -> QueryErrors:
    """Errors with second moment f1 w w^T + f2 (M - w w^T) and bias b w: w (m, d_out) = value of the
    unit step along the tilt, M (d_out, d_out) = ``total``.

    Rotation-invariant laws and Gaussians (after whitening) know only the direction of the tilt and
    what is across it. ``columns``: f1, f2, their derivatives in log n, b, E sum p^2, all (m, len
    n).
    """
    step, matrix = w.cpu().numpy(), total.cpu().numpy()
    f1, f2, df1_dlogn, df2_dlogn, b, sum_p2 = columns
    along = (step**2).sum(-1)[:, None]
    across = np.maximum(np.trace(matrix) - along, 0.0)
    bias = second = None
    if details:
        bias = b[:, :, None] * step[:, None, :]
        line = step[:, None, :, None] * step[:, None, None, :]
        second = f1[:, :, None, None] * line + f2[:, :, None, None] * (matrix - line)
    return QueryErrors(
        mse=along * f1 + across * f2,
        sum_p2=sum_p2,
        limit=limit(head, measure)(x).cpu().numpy(),
        delta=delta_trace(head, measure, x).cpu().numpy(),
        bias=bias,
        dmse_dlogn=along * df1_dlogn + across * df2_dlogn,
        second_moment=second,
        accuracy=accuracy,
    )


def _gaussian(head: Head, measure: Measure, x: Tensor, n: Counts, details: bool) -> QueryErrors:
    """w = V L u, M = V Sigma V^T, f1 and f2 of ``gaussian_error``; bias -f2 V Sigma theta (Stein).

    L L^T = Sigma, u = L^T theta / s, s its length: so rounding is of the size of Sigma, also where
    it is singular along theta.
    """
    white, root = head.tilt(x) @ measure.root, head.V.double() @ measure.root
    length = white.norm(dim=-1)
    s = length.cpu().numpy()[:, None]
    f = gaussian_error_slopes(n[None, :], s)
    columns = f.f1, f.f2, f.df1_dlogn, f.df2_dlogn, -f.f2 * s, f.f2
    w = white / torch.where(length > 0, length, 1.0)[:, None] @ root.T
    return _two_directions(head, measure, x, details, w, root @ root.T, columns, 1e-12)


def _rotational(head: Head, law: Rotational, x: Tensor, n: Counts, details: bool) -> QueryErrors:
    """w = R V u, M = R^2 V V^T; f1 is the error of the cosine, f2 = E sum_j p_j^2 (1 - cos_j^2) /
    (d - 1).

    Both depend on the query through r = R |theta| alone.
    """
    theta, V = head.tilt(x), law.radius * head.V.double()
    size = theta.norm(dim=-1)
    u = torch.where(
        size[:, None] > 0,
        theta / size.clamp_min(1e-300)[:, None],
        torch.eye(law.dim).to(theta)[0],
    )
    columns, accuracy = _over_tilts(law, (law.radius * size).cpu().numpy(), n)
    six = tuple(np.moveaxis(columns, -1, 0))
    return _two_directions(head, law, x, details, u @ V.T, V @ V.T, six, accuracy)


def _over_tilts(measure: Rotational, r: Floats, n: Counts) -> tuple[Floats, float]:
    """The six functions of (r, n) at each r: (m, len n, 6). Many queries are interpolated between
    Chebyshev points of r.

    The functions are analytic in r, so the interpolant converges geometrically; its last
    coefficients tell its error, and where they are not small enough every query is integrated on
    its own.
    """
    if r.size > CHEBYSHEV and np.ptp(r) > 0:
        angles = (np.arange(CHEBYSHEV) + 0.5) * np.pi / CHEBYSHEV
        low, high = float(r.min()), float(r.max())
        nodes = low + 0.5 * (high - low) * (1.0 + np.cos(angles))
        values, accuracy = _over_tilts(measure, nodes, n)
        modes = np.cos(np.outer(np.arange(CHEBYSHEV), angles)) * (2.0 / CHEBYSHEV)
        modes[0] /= 2.0
        coefficients = np.tensordot(modes, values, axes=1)
        size = np.abs(values).max(axis=0) + 1e-300
        tail = float((np.abs(coefficients[-3:]).max(axis=0) / size).max())
        if tail < INTERPOLATED:
            position = np.clip((2.0 * r - low - high) / (high - low), -1.0, 1.0)
            basis = np.cos(np.outer(np.arccos(position), np.arange(CHEBYSHEV)))
            return np.tensordot(basis, coefficients, axes=1), accuracy + 10.0 * tail
    out, accuracy = np.empty((r.size, n.size, 6)), 0.0
    for i, radius in enumerate(r):
        x, log_weights, spread = measure.cosine(float(radius))
        scores = (radius * x)[None]
        along = error_from_nodes(scores, log_weights, x[:, None], None, n, details=True)
        across = error_from_nodes(scores, log_weights, torch.zeros_like(x)[:, None], spread, n)
        assert along.bias is not None
        assert along.dmse_dlogn is not None
        assert across.dmse_dlogn is not None
        parts = (
            along.mse,
            across.mse,
            along.dmse_dlogn,
            across.dmse_dlogn,
            along.bias[..., 0],
            along.sum_p2,
        )
        out[i] = np.stack([part[0] for part in parts], axis=-1)
        accuracy = max(accuracy, along.accuracy, across.accuracy)
    return out, accuracy


def _through_pool(
    head: Head, measure: Measure, x: Tensor, n: Counts, details: bool, size: int, seed: int
) -> ErrorCurve:
    """Exact for a pool drawn from the law: right for the law up to the pool's own sampling error,
    which is told.
    """
    tokens = measure.sample(size, torch.Generator().manual_seed(seed)).double()

    def over(pool: Tensor, more: bool = False) -> ErrorCurve:
        return exact_pool_curve(
            head.queries(x), head.keys(pool), head.values(pool), n, scale=1.0, details=more
        )

    curve = over(tokens, details)
    doubt = pool_stderr(tokens, lambda part: over(part).rms)
    origin = (
        f"exact for a pool of {size} tokens drawn from {type(measure).__name__} (seed {seed}), with"
        " replacement"
    )
    return replace(curve, kind="pool", pool_stderr=doubt, origin=origin)


# ---- The delta method: the error's limiting covariance.

BLOCK = 1 << 21  # scores held at once


def delta_covariance(
    head: Head, measure: Measure, queries: Any
) -> Float64[Tensor, "m d_out d_out"]:
    """C(x) with sqrt(n) (Gamma_n(x) - Gamma(x)) -> N(0, C(x)), so that n * MSE -> tr C.

        C = E[e^2 c c^T] / (E e)^2 = exp(K(2 theta) - 2 K(theta)) V [ Cov_{2 theta} + h h^T ] V^T,
        h = m_{2 theta} - m_theta,

    e = exp<theta, y>, c = V y - Gamma; m and Cov are the tilted mean and covariance. For N(m,
    Sigma): exp(s^2) V (Sigma + Sigma theta theta^T Sigma) V^T. Where the law has no transform at 2
    theta the variance of e is infinite and so is every entry on the diagonal. An entry beyond the
    floating range is infinite too.
    """
    check_pair(head, measure)
    # near a strip's edge every digit counts
    theta = head.tilt(as_tensor(queries, "queries", ndim=2, last=head.dim_query).double())
    V = head.V.double()
    try:
        measure._check_domain(2 * theta)
    except ValueError:
        measure.log_laplace(theta)  # no limit at theta itself: say that instead
        return torch.diag_embed(theta.new_full((len(theta), head.dim_out), torch.inf))
    log_growth, shift, cov = second_tilt(head, measure, theta)
    table = V @ cov @ V.T + shift[:, :, None] * shift[:, None, :]
    table = finite_result(table, "head.V: its values' covariance", "scale V down")
    return _grown(table, log_growth[:, None, None])


def _grown(table: Tensor, log_growth: Tensor) -> Tensor:
    """table exp(log_growth), in two steps, so that a small entry may grow by more than the floating
    range; 0 does not grow.
    """
    half = torch.exp(torch.where(table == 0.0, 0.0, 0.5 * log_growth))
    return table * half * half


def delta_trace(head: Head, measure: Measure, queries: Any) -> Float64[Tensor, " m"]:
    """tr C(x), to which n * MSE tends, without C: tr(V Cov V^T) is the sum over entries of V^T V
    times Cov, d^2 work a query.

    Queries go by in blocks, so that memory stays flat in any dimension; infinite where
    delta_covariance is.
    """
    check_pair(head, measure)
    theta = head.tilt(as_tensor(queries, "queries", ndim=2, last=head.dim_query).double())
    V = head.V.double()
    gram = V.T @ V
    traces = []
    try:
        for rows in torch.split(theta, max(1, BLOCK // measure.dim**2)):
            log_growth, shift, cov = second_tilt(head, measure, rows)
            spread = torch.einsum("ij,mij->m", gram, cov)
            traces.append(_grown(spread + shift.square().sum(-1), log_growth))
    except ValueError:
        measure.log_laplace(theta)  # no limit at theta itself: say that instead
        return theta.new_full((len(theta),), torch.inf)
    return torch.cat(traces)
