"""Setting: the numbers of one head, one law of tokens and one law of queries that predictions are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esscher.attention.head import Head
from esscher.inputs import as_positive
from esscher.measures.base import Measure
from esscher.measures.gaussian import Gaussian, check_covariance
from esscher.theory.subgaussian import norm_moment, subgaussian_parameter, support_radius, value_fourth_moment

__all__ = ["Setting", "setting_of", "tilted_moment"]

SMALLEST = 1e-100  # a point mass is sub-Gaussian for every sigma; the formulas divide by sigma


@dataclass(frozen=True)
class Setting:
    """Symbols as in ``boursier_query`` and ``boursier_average``; None where the law does not have the number."""

    head: Head
    measure: Measure
    queries: Measure
    own_queries: bool  # queries have the law of the tokens (self-attention)
    radius: float  # bound on |x| for the statements at one query
    query: Tensor  # a query of that norm, along the direction A stretches most
    tilt: float  # largest |theta(x)| over |x| <= radius
    sigma: float | None
    tau: float | None  # sub-Gaussian parameter of the centred query law
    a_norm: float
    v_norm: float
    fourth: float | None  # E|V (y - E y)|^4
    token_fourth: float | None
    token_eighth: float | None
    queries_centred: bool
    horizon: float  # ||Sigma^{1/2} A||_2
    horizon2: float  # ||Sigma^{1/2} A Sigma_q^{1/2}||_2
    score_deviation: float  # root mean square over queries of s(x) = sqrt(theta^T Sigma theta)

    @property
    def u_norm(self) -> float | None:
        return None if self.tau is None else self.tau * self.a_norm

    @property
    def coupling(self) -> float:
        return self.measure.reach * self.horizon**2


def setting_of(head: Head, measure: Measure, queries_law: Measure | None = None, radius: Any = None) -> Setting:
    """``queries_law`` defaults to the law of the tokens, ``radius`` to the root mean square norm of a query."""
    head.check_measure(measure)
    queries = measure if queries_law is None else queries_law
    if queries.dim != head.dim_query:
        raise ValueError(
            f"queries_law: expected a measure of dimension {head.dim_query}, the head's queries, got {queries.dim}; "
            "pass queries_law when queries and tokens differ"
        )
    mean, cov_q = queries.mean.double(), queries.cov.double()
    root_mean_square = math.sqrt(float(cov_q.trace() + mean @ mean))
    R = root_mean_square if radius is None else as_positive(radius, "radius")
    A, V = head.A.double(), head.V.double()
    bias = torch.zeros(head.dim, dtype=torch.float64) if head.tilt_bias is None else head.tilt_bias.double()
    _, root = check_covariance(measure.cov, "measure.cov")
    _, root_q = check_covariance(queries.cov, "queries_law.cov")
    singular = torch.linalg.svd(A)
    direction = singular.Vh[0] * (-1.0 if float((A @ singular.Vh[0]) @ bias) < 0 else 1.0)
    a_norm = float(singular.S[0])
    sigma = subgaussian_parameter(measure)
    scores = root.T @ torch.cat([A @ root_q, (A @ mean + bias)[:, None]], dim=1)
    return Setting(
        head=head,
        measure=measure,
        queries=queries,
        own_queries=queries is measure,
        radius=R,
        query=R * direction,
        tilt=a_norm * R + float(bias.norm()),
        sigma=None if sigma is None else max(sigma, SMALLEST),
        tau=subgaussian_parameter(queries),
        a_norm=a_norm,
        v_norm=float(torch.linalg.matrix_norm(V, ord=2)),
        fourth=value_fourth_moment(measure, V),
        token_fourth=norm_moment(measure, 4),
        token_eighth=norm_moment(measure, 8),
        queries_centred=float(mean.norm()) <= 1e-9 * root_mean_square,
        horizon=float(torch.linalg.matrix_norm(root.T @ A, ord=2)),
        horizon2=float(torch.linalg.matrix_norm(root.T @ A @ root_q, ord=2)),
        score_deviation=float(scores.norm()),
    )


def tilted_moment(setting: Setting, p: int, q: int) -> float | None:
    """Upper bound on E_x[ |x|^q E_{tilted by A x} |y - E y|^p ], the left side of [S] Assumption 3.3; None where
    unknown.

    Gaussian tokens: 2^{p-1} (||Sigma||^p ||A||^p E|x|^{p+q} + E|y - E y|^p E|x|^q), as in [S] Lemma F.1; bounded
    tokens: rho^p E|x|^q. The paper's M_{p,q} is this over sigma^{2p}.
    """
    measure, queries = setting.measure, setting.queries
    own = 1.0 if q == 0 else norm_moment(queries, q)
    if own is None or not setting.queries_centred:
        return None
    rho = support_radius(measure)
    if rho is not None:
        return float(rho**p * own)
    if not isinstance(measure, Gaussian):
        return None
    spread, far = norm_moment(measure, p), norm_moment(queries, p + q)
    if spread is None or far is None:
        return None
    return float(2.0 ** (p - 1) * ((measure.reach * setting.a_norm) ** p * far + spread * own))
