"""Risks with the query inside the prompt, (L mu_L + delta_q) / (L + 1): L tokens and one known key.
[S], Remark 3.2.

The query's own token z_q = (x_q, 0) scores b = x_q^T A1 x_q and has the value a = r1^T x_q, which
is 0 in the block form. Given w and x_q, with f1, f2, q1, q2, c of ``gaussian_sure`` at (L, s, b),
and s, kappa, y = <w, x_q> as in ``softmax_block``, the prediction has mean kappa + delta, delta =
(a - kappa) q1 - kappa f2, and

    R_L - R_infinity = 1/2 E[ f2 (r^T Gamma_w r - kappa^2/s^2) + f1 kappa^2/s^2 + (a - kappa)^2 q2 -
    2 kappa (a - kappa) c
                              + 2 (kappa - y) delta ] .

Softmax: a cubature over (w, x_q); in the block form over x_q alone, since s and b do not depend on
w. Linear attention, which divides by L + 1: sixth moments of x_q, a closed form.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.icl.layer import UV
from esscher.icl.risk.linear import active, linear_variance, mean_square, prediction
from esscher.icl.risk.softmax_general import Rule, general_terms
from esscher.icl.risk.sure_table import sure_table
from esscher.icl.tasks import LinearTask

__all__ = ["inside_excess", "inside_shrinkage", "linear_inside"]


class Products(NamedTuple):
    """s, b, r^T Gamma_w r and the products of kappa, a and y, for every task and query of a rule;
    or averaged over tasks.
    """

    s: Tensor
    b: Tensor
    spread: Tensor
    kappa_kappa: Tensor
    kappa_y: Tensor
    a_kappa: Tensor
    a_y: Tensor
    a_a: Tensor


def inside_excess(
    uv: UV, task: LinearTask, length: int, rule: Rule
) -> Float64[Tensor, " rotations"]:
    """R_L - R_infinity of softmax attention with the query inside, one estimate for each rotation;
    differentiable once.
    """
    at = _products(uv, task, rule)
    f1, f2, q1, q2, c = sure_table(length)(at.s, at.b)
    apart = at.a_a - 2.0 * at.a_kappa + at.kappa_kappa
    square = (
        f2 * at.spread
        + (f1 - f2) * at.kappa_kappa / at.s**2
        + apart * q2
        - 2.0 * (at.a_kappa - at.kappa_kappa) * c
    )
    return 0.5 * rule.average(square + 2.0 * _moved(at, f2, q1))


def inside_shrinkage(
    uv: UV, task: LinearTask, length: int, rule: Rule
) -> Float64[Tensor, " rotations"]:
    """What L tokens and the query's own change in the squared bias: 1/2 E[delta^2 + 2 (kappa - y)
    delta].
    """
    at = _products(uv, task, rule)
    _, f2, q1, _, _ = sure_table(length)(at.s, at.b)
    apart = at.a_a - 2.0 * at.a_kappa + at.kappa_kappa
    square = apart * q1**2 - 2.0 * (at.a_kappa - at.kappa_kappa) * q1 * f2 + at.kappa_kappa * f2**2
    return 0.5 * rule.average(square + 2.0 * _moved(at, f2, q1))


def linear_inside(
    uv: UV, task: LinearTask, length: int
) -> tuple[Float64[Tensor, ""], Float64[Tensor, ""]]:
    """1/2 E (E[prediction | w, x_q] - y)^2 and 1/2 E Var(prediction | w, x_q) of linear attention
    with the query inside.

    The prediction is (L/(L+1)) times that on L tokens plus a b / (L+1). With S = Sigma_q and A the
    symmetric part of A1,

        E[(x^T A x) x x^T]   = tr(AS) S + 2 SAS
        E[(x^T A x)^2 x x^T] = (tr(AS)^2 + 2 tr(ASAS)) S + 4 tr(AS) SAS + 8 SASAS .
    """
    A1, _, r1, _ = parts = active(uv)
    S, A, share = task.query_sigma, 0.5 * (A1 + A1.mT), length / (length + 1.0)
    moved = A @ S
    trace, turned = torch.trace(moved), S @ moved
    third = trace * S + 2.0 * turned
    sixth = (
        (trace**2 + 2.0 * torch.trace(moved @ moved)) * S
        + 4.0 * trace * turned
        + 8.0 * turned @ moved
    )
    constant, slope, quadratic = prediction(parts, task)
    mean = constant + torch.sum(task.sigma * task.task_cov) * quadratic  # of h(w)
    eye = torch.eye(task.dim, dtype=torch.float64)
    square = mean_square(share * constant, share * slope - eye, share * quadratic, task)
    square = (
        square
        + 2.0 * share * (1.0 - share) * (mean @ third @ r1)
        + (1.0 - share) ** 2 * (r1 @ sixth @ r1)
    )
    return 0.5 * square, share**2 * linear_variance(uv, task) / length


def _moved(at: Products, f2: Tensor, q1: Tensor) -> Tensor:
    """(kappa - y) delta."""
    return (at.a_kappa - at.kappa_kappa - at.a_y + at.kappa_y) * q1 - (
        at.kappa_kappa - at.kappa_y
    ) * f2


def _products(uv: UV, task: LinearTask, rule: Rule) -> Products:
    A1, a, r1, v = active(uv)
    x = rule.queries.points @ task.query_root.mT
    own = torch.sum((x @ A1.mT) * x, dim=-1)[:, None, :]
    if not bool(a.any()) and not bool(r1.any()):
        tilt = x @ A1.mT
        along, zero = v * tilt @ task.sigma, torch.zeros_like(own)
        s = torch.sum((tilt @ task.sigma) * tilt, dim=-1).clamp_min(1e-24).sqrt()[:, None, :]
        square, crossed = (
            torch.sum((along @ task.task_cov) * other, dim=-1)[:, None, :] for other in (along, x)
        )
        spread = v**2 * (torch.sum(task.sigma * task.task_cov) + task.noise)
        return Products(s, own, spread, square, crossed, zero, zero, zero)
    s, kappa, spread, label = general_terms(uv, task, rule)
    value = (x @ r1)[:, None, :].expand_as(kappa)
    return Products(
        s, own.expand_as(s), spread, kappa**2, kappa * label, value * kappa, value * label, value**2
    )
