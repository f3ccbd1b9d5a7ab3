"""The delta method: the error's limiting covariance."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.attention.head import Head, check_pair
from esscher.attention.limit import second_tilt
from esscher.inputs import as_tensor, finite_result
from esscher.measures.base import Measure

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
    theta = head.tilt(
        as_tensor(queries, "queries", ndim=2, last=head.dim_query).double()
    )  # near a strip's edge every digit counts
    V = head.V.double()
    try:
        measure._check_domain(2 * theta)
    except ValueError:
        measure.log_laplace(theta)  # no limit at theta itself: say that instead
        diagonal = torch.full(
            (theta.shape[0], head.dim_out), torch.inf, dtype=torch.float64, device=theta.device
        )
        return torch.diag_embed(diagonal)
    twice = second_tilt(head, measure, theta)
    table = V @ twice.cov @ V.T + twice.shift[:, :, None] * twice.shift[:, None, :]
    table = finite_result(table, "head.V: its values' covariance", "scale V down")
    return _grown(table, twice.log_growth[:, None, None])


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
            twice = second_tilt(head, measure, rows)
            spread = torch.einsum("ij,mij->m", gram, twice.cov)
            traces.append(_grown(spread + twice.shift.square().sum(-1), twice.log_growth))
    except ValueError:
        measure.log_laplace(theta)  # no limit at theta itself: say that instead
        return torch.full((theta.shape[0],), torch.inf, dtype=torch.float64, device=theta.device)
    return torch.cat(traces)
