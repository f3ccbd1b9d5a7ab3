"""Where gradient flow begins in Theorem 5.2 of [S], and where it ends for linear attention and for
infinite prompts.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.icl.layer import Block
from esscher.icl.risk.linear import limit_risk
from esscher.icl.risk.value import as_length
from esscher.icl.tasks import LinearTask
from esscher.inputs import as_positive, as_tensor
from esscher.theory.training import alpha_limit_mended, alpha_limit_printed

__all__ = ["alpha_limit", "flow_limit", "prompt_covariance", "start_block"]

SINGULAR = 1e-12  # an eigenvalue of Sigma below this share of the largest is 0


def alpha_limit(task: LinearTask) -> float:
    """sqrt(2) / (d^{1/4} max(||Sigma||, ||Sigma||^{1/2})): Theorem 5.2 of [S] is for 0 < alpha
    below it.

    The paper has ||Sigma|| alone, which is not dimensionless and too wide for ||Sigma|| < 1
    (``alpha_limit_mended``); this is the smaller of the two.
    """
    norm = float(torch.linalg.matrix_norm(task.sigma, ord=2))
    return min(alpha_limit_printed(task.dim, norm), alpha_limit_mended(task.dim, norm))


def start_block(task: LinearTask, alpha: Any = None, theta: Any = None) -> Block:
    """U11 = alpha Theta Theta^T / |Theta Theta^T|_F, v = alpha: the start of [S], Assumption 5.1.

    ``alpha`` is half of ``alpha_limit`` and Theta the identity unless given. Three departures from
    the paper: Theta of any size is taken and scaled, where the assumption asks for |Theta
    Theta^T|_F = 1; alpha > 0 is asked for, where it has any real number; and Theta^T Sigma = 0 is
    refused, which is what the proof needs where the paper prints Theta Sigma. Warns when alpha is
    outside the range of Theorem 5.2, and when the start has no less risk than no weights at all:
    then the flow may end at 0.
    """
    high = alpha_limit(task)
    alpha = 0.5 * high if alpha is None else as_positive(alpha, "alpha")
    root = (
        torch.eye(task.dim, dtype=torch.float64)
        if theta is None
        else as_tensor(theta, "theta", ndim=2).double()
    )
    if root.shape[0] != task.dim:
        raise ValueError(
            f"theta: expected {task.dim} rows, one for each covariate, got shape"
            f" {tuple(root.shape)}"
        )
    gram = root @ root.mT
    if float(torch.linalg.matrix_norm(gram @ task.sigma)) == 0:
        raise ValueError(
            "theta: expected Theta Theta^T Sigma other than zero, since the flow never leaves such"
            " a start"
        )
    start = Block(
        alpha * gram / torch.linalg.matrix_norm(gram), torch.tensor(alpha, dtype=torch.float64)
    )
    own, nothing = (
        float(limit_risk(block.uv(), task)) for block in (start, Block(0.0 * gram, 0.0 * start.v))
    )
    doubts = []
    if alpha >= high:
        limit = f"sqrt(2) / (d^(1/4) max(||Sigma||, ||Sigma||^(1/2))) = {high:g}"
        doubts.append(f"it is outside the range of Theorem 5.2, 0 < alpha < {limit}")
    if own >= nothing > 0.5 * task.noise:
        doubts.append(
            f"the risk at the start, {own:.3g}, is not below that of no weights, {nothing:.3g}, as"
            " its proof needs"
        )
    if doubts:
        warnings.warn(
            f"alpha = {alpha:g}: {'; '.join(doubts)}: the flow may not reach the Bayes risk",
            stacklevel=2,
        )
    return start


def prompt_covariance(task: LinearTask, length: Any) -> Float64[Tensor, "d d"]:
    """Sigma_L = (1 + 1/L) Sigma + (1/L) (tr(Sigma W) + tau^2) W^{-1}, whose inverse is the best v
    U11 of linear attention.

    For W = I and no noise it is (1 + 1/L) Sigma + (1/L) tr(Sigma) I of Zhang et al. (2024), Theorem
    4.1.
    """
    length = as_length(length)
    if math.isinf(length):
        return task.sigma.clone()
    budget = float(torch.sum(task.sigma * task.task_cov)) + task.noise
    cov: Tensor = (1.0 + 1.0 / length) * task.sigma + budget / length * torch.linalg.inv(
        task.task_cov
    )
    return cov


def flow_limit(
    task: LinearTask, start: Block, length: Any = math.inf, query_inside: bool = False
) -> Block:
    """Where the gradient flow of linear attention ends; for an infinite prompt also that of softmax
    attention.

        v U11 -> A + v P(U11(0)),     v^2 = (q + sqrt(q^2 + 4 |A|_F^2)) / 2,     q = |P(U11(0))|_F^2
        + v(0)^2 - |U11(0)|_F^2

    A = Sigma_L^{-1} on the range of Sigma and 0 off it, P(M) = M - Pi M Pi with Pi the projection
    on that range: the flow never moves P(U11), and |U11|_F^2 - v^2 is constant along it. With q = 0
    and A = Sigma^{-1} this is Remark 5.3 of [S], with singular Sigma its appendix F.3, with finite
    L Theorem 4.1 of Zhang et al. (2024). v(0) > 0 is assumed.

    ``query_inside`` divides by L + 1 and adds a token of value 0, so that A is (1 + 1/L) times as
    large. Queries of another covariance than the prompt's change the way and not the end, as long
    as both are invertible.
    """
    length = as_length(length)
    if float(start.v) <= 0:
        raise ValueError(f"start: expected v above 0, got {float(start.v):g}")
    values, vectors = torch.linalg.eigh(task.sigma)
    basis = vectors[:, values > SINGULAR * values[-1]]
    if (
        task.shifted
        and min(basis.shape[1], int(torch.linalg.matrix_rank(task.query_sigma))) < task.dim
    ):
        raise ValueError(
            "query_sigma: expected both covariances invertible where they differ; otherwise the"
            " limit is not known"
        )
    sigma, W = basis.mT @ task.sigma @ basis, basis.mT @ task.task_cov @ basis
    share = 0.0 if math.isinf(length) else 1.0 / length
    eye = torch.eye(sigma.shape[0], dtype=torch.float64)
    system = (1.0 + share) * W @ sigma + share * (torch.sum(sigma * W) + task.noise) * eye
    if float(torch.linalg.cond(system)) > 1.0 / SINGULAR:
        raise ValueError(
            "task_cov: expected a law of tasks that fills the range of sigma; otherwise the limit"
            " is not unique"
        )
    best = basis @ torch.linalg.solve(system, W) @ basis.mT * (1.0 + share if query_inside else 1.0)
    U = start.U11.detach().double()
    projection = basis @ basis.mT
    frozen = U - projection @ U @ projection
    offset = torch.sum(frozen**2) + float(start.v) ** 2 - torch.sum(U**2)
    v = torch.sqrt(0.5 * (offset + torch.sqrt(offset**2 + 4.0 * torch.sum(best**2))))
    return Block(best / v + frozen, v)
