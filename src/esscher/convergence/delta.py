"""The delta method: the error's limiting covariance, and confidence regions for the limit from one finite sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import scipy.stats
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from esscher.attention.head import Head, check_pair
from esscher.attention.second_tilt import second_tilt
from esscher.attention.softmax import attention_inputs
from esscher.inputs import as_positive, as_tensor, finite_result
from esscher.measures.base import Measure

__all__ = ["ConfidenceRegion", "confidence_region", "delta_covariance", "delta_trace"]

BLOCK = 1 << 21  # scores held at once
ROUNDING = 1e-14  # of the values' size: lengths below it are none


def delta_covariance(head: Head, measure: Measure, queries: Any) -> Float64[Tensor, "m d_out d_out"]:
    """C(x) with sqrt(n) (Gamma_n(x) - Gamma(x)) -> N(0, C(x)), so that n * MSE -> tr C.

        C = E[e^2 c c^T] / (E e)^2 = exp(K(2 theta) - 2 K(theta)) V [ Cov_{2 theta} + h h^T ] V^T,   h = m_{2 theta} - m_theta,

    e = exp<theta, y>, c = V y - Gamma; m and Cov are the tilted mean and covariance. For N(m, Sigma):
    exp(s^2) V (Sigma + Sigma theta theta^T Sigma) V^T. Where the law has no transform at 2 theta the variance of e is infinite
    and so is every entry on the diagonal. An entry beyond the floating range is infinite too.
    """
    check_pair(head, measure)
    theta = head.tilt(
        as_tensor(queries, "queries", ndim=2, last=head.dim_query).double()
    )  # near a strip's edge every digit counts
    V = head.V.double()
    try:
        measure._check_domain(2 * theta)
    except ValueError:
        measure.log_laplace(theta)  # no limit at theta itself: say that instead
        diagonal = torch.full((theta.shape[0], head.dim_out), torch.inf, dtype=torch.float64, device=theta.device)
        return torch.diag_embed(diagonal)
    twice = second_tilt(head, measure, theta)
    table = V @ twice.cov @ V.T + twice.shift[:, :, None] * twice.shift[:, None, :]
    table = finite_result(table, "head.V: its values' covariance", "scale V down")
    return _grown(table, twice.log_growth[:, None, None])


def _grown(table: Tensor, log_growth: Tensor) -> Tensor:
    """table exp(log_growth), in two steps, so that a small entry may grow by more than the floating range; 0 does not grow."""
    half = torch.exp(torch.where(table == 0.0, 0.0, 0.5 * log_growth))
    return table * half * half


def delta_trace(head: Head, measure: Measure, queries: Any) -> Float64[Tensor, " m"]:
    """tr C(x), to which n * MSE tends, without C: tr(V Cov V^T) is the sum over entries of V^T V times Cov, d^2 work a query.

    Queries go by in blocks, so that memory stays flat in any dimension; infinite where delta_covariance is.
    """
    check_pair(head, measure)
    theta = head.tilt(as_tensor(queries, "queries", ndim=2, last=head.dim_query).double())
    V = head.V.double()
    gram = V.T @ V
    traces = []
    try:
        for rows in torch.split(theta, max(1, BLOCK // measure.dim**2)):
            twice = second_tilt(head, measure, rows)
            spread = torch.einsum("ij,mij->m", gram, twice.cov)
            traces.append(_grown(spread + twice.shift.square().sum(-1), twice.log_growth))
    except ValueError:
        measure.log_laplace(theta)  # no limit at theta itself: say that instead
        return torch.full((theta.shape[0],), torch.inf, dtype=torch.float64, device=theta.device)
    return torch.cat(traces)


@dataclass(frozen=True)
class ConfidenceRegion:
    """Ellipsoids { g : (center - g)^T cov^-1 (center - g) <= bound } that hold the limit with the stated asymptotic chance."""

    center: Float64[Tensor, "m d_v"]
    cov: Float64[Tensor, "m d_v d_v"]  # plug-in covariance of Gamma_n(x), C / n
    bound: float  # quantile of chi-square with d_v degrees of freedom
    level: float
    effective_tokens: Float64[Tensor, " m"]  # 1 / sum_j p_j^2; the region can be trusted when this is large

    def contains(self, points: Any) -> Bool[Tensor, " m"]:
        """Whether each query's point lies in its region.

        A region may be flat (values that do not vary in some direction, one key with all the weight): off its plane, by
        more than rounding, nothing lies in it.
        """
        given = as_tensor(points, "points", ndim=2, last=self.center.shape[1]).double()
        if given.shape != self.center.shape:
            raise ValueError(f"points: expected one for each of {len(self.center)} queries, got {len(given)}")
        sizes, axes = torch.linalg.eigh(self.cov)
        along = (axes.mT @ (given - self.center)[:, :, None])[:, :, 0].square()
        rounding = (ROUNDING * (given.abs() + self.center.abs()).amax(1, keepdim=True)).square()
        flat = sizes <= torch.maximum(ROUNDING * sizes[:, -1:], rounding)
        on_plane = ~(flat & (along > rounding)).any(1)
        distance = torch.where(flat, 0.0, along / torch.where(flat, 1.0, sizes)).sum(1)
        inside: Tensor = (distance <= self.bound) & on_plane
        return inside

    @property
    def half_widths(self) -> Float64[Tensor, "m d_v"]:
        """Half-widths of the box around each region: simultaneous intervals for all output coordinates."""
        return (self.bound * self.cov.diagonal(dim1=-2, dim2=-1)).sqrt()


def confidence_region(q: Any, k: Any, v: Any, level: Any = 0.95, scale: Any = None) -> ConfidenceRegion:
    """Regions for the limit Gamma(x) from attention on one sample of n keys, by the plug-in covariance

        C_n / n = sum_j p_j^2 (v_j - Gamma_n)(v_j - Gamma_n)^T,     p_j the softmax weights.

    Asymptotic in the number of effective tokens: a query that looks at a few keys is not covered, and says so through
    ``effective_tokens``.
    """
    q, k, v, scale, _ = attention_inputs(q, k, v, scale, None)
    level = as_positive(level, "level")
    if level >= 1.0:
        raise ValueError(f"level: expected a number between 0 and 1, got {level}")
    if k.shape[0] <= v.shape[1]:
        raise ValueError(f"k, v: expected more keys than output coordinates, got {k.shape[0]} keys for {v.shape[1]}")
    centers, covs, sums = [], [], []
    step = max(1, BLOCK // k.shape[0])
    for start in range(0, q.shape[0], step):
        rows = q[start : start + step].double()
        scores = finite_result(scale * (rows @ k.double().T), "q, k: their scores", "lower the scale or the size of q and k")
        p = scores.softmax(-1)
        center = p @ v.double()
        covs += [_weighted_scatter(p[i], v.double() - center[i]) for i in range(rows.shape[0])]
        centers.append(center)
        sums.append((p * p).sum(-1))
    bound = float(scipy.stats.chi2.ppf(level, v.shape[1]))
    cov = finite_result(torch.stack(covs), "v: its covariance", "scale v down")
    return ConfidenceRegion(torch.cat(centers), cov, bound, level, 1.0 / torch.cat(sums))


def _weighted_scatter(p: Tensor, apart: Tensor) -> Tensor:
    weighted = p[:, None] * apart
    return weighted.T @ weighted
