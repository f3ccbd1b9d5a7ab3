"""A law of queries for an exact curve: as weighted rows where that is exact, drawn with its
standard error where it is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.attention.head import Head
from esscher.convergence.curve import ErrorCurve, QueryErrors
from esscher.measures.base import Measure
from esscher.measures.matrices import product

__all__ = ["UNSURE", "drawn", "integrated", "relative_change"]

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
    entire = measure.is_even and measure.subgaussian_roots is not None
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
