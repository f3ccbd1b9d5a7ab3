"""The risk of softmax attention on L tokens for any (U, V): the formula of ``softmax_block`` by a
cubature over (w, x_q).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.icl.layer import UV
from esscher.icl.risk.cubature import Cubature, gaussian_cubature
from esscher.icl.risk.error_table import table
from esscher.icl.risk.linear import active
from esscher.icl.tasks import LinearTask

__all__ = ["Rule", "general_excess", "general_shrinkage", "product_rule"]


class Rule(NamedTuple):
    """A cubature over tasks and one over queries, rotated together."""

    tasks: Cubature
    queries: Cubature

    def average(
        self, values: Float64[Tensor, "rotations tasks queries"]
    ) -> Float64[Tensor, " rotations"]:
        """One estimate of the mean for each rotation; values that do not depend on the task have
        one row.
        """
        over = values @ self.queries.weights
        return over[:, 0] if over.shape[1] == 1 else over @ self.tasks.weights


def product_rule(dim: int, rotations: int = 8, seed: int = 0) -> Rule:
    """The rule behind ``general_excess``: 6 shells of tasks, on which the excess is nearly a
    polynomial, 16 of queries.
    """
    tasks = gaussian_cubature(dim, rotations, 6, seed)
    return Rule(tasks, gaussian_cubature(dim, rotations, 16, seed + 1, True))


class Terms(NamedTuple):
    """s, kappa, r^T Gamma_w r and <w, x_q>, each for every task and query of a rule."""

    s: Tensor
    kappa: Tensor
    spread: Tensor
    label: Tensor


def general_terms(uv: UV, task: LinearTask, rule: Rule) -> Terms:
    """theta^T z = (A1 x_q + w <a, x_q>)^T x + <a, x_q> noise, and r^T z = (r1 + v w)^T x + v
    noise.
    """
    A1, a, r1, v = active(uv)
    w, x = rule.tasks.points @ task.task_root.mT, rule.queries.points @ task.query_root.mT
    value, moved, own = r1 + v * w, x @ A1.mT, (x @ a)[:, None, :]
    w_sigma, value_sigma = w @ task.sigma, value @ task.sigma
    plain = torch.sum((moved @ task.sigma) * moved, dim=-1)[:, None, :]
    label_square = (torch.sum(w_sigma * w, dim=-1) + task.noise)[:, :, None]
    square = plain + 2.0 * own * (w_sigma @ moved.mT) + own**2 * label_square
    kappa = (
        value_sigma @ moved.mT
        + own * (torch.sum(value_sigma * w, dim=-1) + task.noise * v)[:, :, None]
    )
    spread = (torch.sum(value_sigma * value, dim=-1) + task.noise * v * v)[:, :, None]
    return Terms(square.clamp_min(1e-24).sqrt(), kappa, spread, w @ x.mT)


def general_excess(
    uv: UV, task: LinearTask, length: int, rule: Rule
) -> Float64[Tensor, " rotations"]:
    """R_L - R_infinity for any (U, V), one estimate for each rotation of the rule; differentiable
    once.
    """
    s, kappa, spread, label = general_terms(uv, task, rule)
    f1, f2 = table(length)(s)
    return 0.5 * rule.average(
        f2 * spread + (f1 - f2) * (kappa / s) ** 2 - 2.0 * f2 * kappa * (kappa - label)
    )


def general_shrinkage(
    uv: UV, task: LinearTask, length: int, rule: Rule
) -> Float64[Tensor, " rotations"]:
    """``block_shrinkage`` for any (U, V)."""
    s, kappa, _, label = general_terms(uv, task, rule)
    _, f2 = table(length)(s)
    return 0.5 * rule.average((f2 * kappa) ** 2 - 2.0 * f2 * kappa * (kappa - label))
