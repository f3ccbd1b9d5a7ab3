"""Lemmas E.2 and E.4 of [S] beside what they bound: the risk and its gradient in (U, V) on L
tokens, minus their limits.

The bounds are functions of norms over tasks, tokens and queries; the norms of the limit and of the
label are averages of polynomials of (w, x_q), those of the error are measured on prompts.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from esscher.icl.layer import UV, tensors
from esscher.icl.risk.exact import risk, risk_gradient
from esscher.icl.risk.linear import active
from esscher.icl.risk.softmax_general import product_rule
from esscher.icl.tasks import LinearTask
from esscher.theory.training import lemma_e2_mended, lemma_e2_printed, lemma_e4

__all__ = ["LimitNorms", "limit_norms", "risk_gaps"]


class LimitNorms(NamedTuple):
    """(E T^2)^{1/2}, (E T^4)^{1/4} of the limit T = kappa, (E|grad T|^2)^{1/2} in (U, V), and the
    label's second and fourth.
    """

    limit2: float
    limit4: float
    gradient2: float
    label2: float
    label4: float


def limit_norms(task: LinearTask, uv: UV, rotations: int = 32) -> LimitNorms:
    """With Gamma_w the tokens' covariance, T = r^T Gamma_w U z_q, grad_r T = Gamma_w U z_q and
    grad_U T = Gamma_w r z_q^T.

    Cubature over (w, x_q), exact for the second moments and, as a polynomial of degree 4 in x_q,
    nearly so for the fourth.
    """
    A1, a, r1, v = active(uv)
    rule = product_rule(task.dim, rotations)
    w, x = rule.tasks.points @ task.task_root.mT, rule.queries.points @ task.query_root.mT
    gram = torch.cat(
        [torch.eye(task.dim, dtype=torch.float64).expand(*w.shape, -1), w[..., None, :]], dim=-2
    )
    gamma = gram @ task.sigma @ gram.mT
    gamma[..., -1, -1] += task.noise
    value = gamma @ torch.cat([r1, v[None]])  # Gamma_w r, a row for each task
    tilt = torch.cat([x @ A1.mT, (x @ a)[..., None]], dim=-1)
    limit = value @ tilt.mT
    moved = torch.einsum("rtij,rqj->rtqi", gamma, tilt)
    gradient = (moved**2).sum(dim=-1) + (value**2).sum(dim=-1)[:, :, None] * (x**2).sum(dim=-1)[
        :, None, :
    ]
    means = [float(rule.average(part).mean()) for part in (limit**2, limit**4, gradient)]
    moved_cov = task.query_sigma @ task.task_cov
    spread = float(torch.trace(moved_cov))
    fourth = 3.0 * ((spread + task.noise) ** 2 + 2.0 * float(torch.trace(moved_cov @ moved_cov)))
    return LimitNorms(
        means[0] ** 0.5,
        means[1] ** 0.25,
        means[2] ** 0.5,
        math.sqrt(spread + task.noise),
        fourth**0.25,
    )


def risk_gaps(
    task: LinearTask, uv: UV, length: int, error2: float, error4: float, gradient_error2: float
) -> list[dict[str, Any]]:
    """Two rows, for the risk and for its gradient: measured, as printed, mended. The errors are
    those on ``length`` tokens.

    Of Lemma E.4 both are the proof's (28) with root mean squares over tasks; the printed one has
    its factor 2 sqrt 2.
    """
    at = limit_norms(task, uv)
    gap = abs(risk(task, uv, length).value - risk(task, uv, math.inf).value)
    own, limit = (tensors(risk_gradient(task, uv, n)[1]) for n in (length, math.inf))
    apart = math.sqrt(
        sum(float(((one - other) ** 2).sum()) for one, other in zip(own, limit, strict=True))
    )
    mended = float(lemma_e4(error2, gradient_error2, at.label2, at.limit2, at.gradient2))
    printed = float(
        lemma_e4(error2, 2.0 * math.sqrt(2.0) * gradient_error2, at.label2, at.limit2, at.gradient2)
    )
    by_risk = {
        "printed": float(lemma_e2_printed(error2, error4, at.label4, at.limit4)),
        "mended": float(lemma_e2_mended(error2, at.label2, at.limit2)),
    }
    return [
        {"quantity": "risk", "measured": gap} | by_risk,
        {"quantity": "gradient", "measured": apart, "printed": printed, "mended": mended},
    ]
