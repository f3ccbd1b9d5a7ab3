"""The risk of an infinite prompt, and of linear attention on L tokens: polynomials in (U, V).

Given w, tokens z = (x, y) are N(0, Gamma_w). With U's first d columns split into A1 (d x d) and a^T
(the last row), V's last row r = (r1, v), the prediction on infinitely many tokens is

    kappa = r^T Gamma_w U z_q = h(w)^T x_q,     h(w) = A1^T Sigma (r1 + v w) + (r1^T Sigma w + v
    (w^T Sigma w + tau^2)) a .

Everything here is an average of products of quadratic polynomials of w ~ N(0, W). [S], section 5.
The query x_q is N(0, Sigma_q), Sigma_q = Sigma unless the task says otherwise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.icl.layer import UV
from esscher.icl.tasks import LinearTask

__all__ = [
    "Active",
    "active",
    "block_linear_gradient",
    "limit_risk",
    "linear_risk",
    "linear_variance",
    "mean_square",
    "prediction",
]

Floats = npt.NDArray[np.float64]


class Active(NamedTuple):
    """The parts of (U, V) that act on the prediction."""

    A1: Tensor
    a: Tensor
    r1: Tensor
    v: Tensor


class Quadratic(NamedTuple):
    """c + b^T w + w^T M w, M symmetric."""

    c: Tensor
    b: Tensor
    M: Tensor

    def mean(self, W: Tensor) -> Tensor:
        return self.c + torch.sum(self.M * W)


def mean_product(one: Quadratic, two: Quadratic, W: Tensor) -> Tensor:
    """E[one two] for w ~ N(0, W)."""
    crossed = 2.0 * torch.trace(one.M @ W @ two.M @ W)
    return one.mean(W) * two.mean(W) + one.b @ W @ two.b + crossed


def active(uv: UV) -> Active:
    """A1, a, r1, v in float64."""
    d = uv.dim
    U, r = uv.U.double(), uv.V.double()[-1]
    return Active(U[:d, :d], U[d, :d], r[:d], r[d])


def limit_risk(uv: UV, task: LinearTask) -> Float64[Tensor, ""]:
    """R_infinity = 1/2 E (kappa - <w, x_q>)^2 + tau^2 / 2, for softmax and for linear attention.
    [S], section 5.
    """
    constant, slope, a = prediction(active(uv), task)
    slope = slope - torch.eye(task.dim, dtype=torch.float64)
    return 0.5 * mean_square(constant, slope, a, task) + 0.5 * task.noise


def linear_variance(uv: UV, task: LinearTask) -> Float64[Tensor, ""]:
    """L times 1/2 E Var(prediction | w, x_q): 1/2 E[(r^T Gamma_w r)(theta^T Gamma_w theta) +
    kappa^2], theta = U z_q.

    The empirical second moment of L tokens is Wishart with mean Gamma_w.
    """
    A1, a, r1, v = parts = active(uv)
    sigma, query, tau2 = task.sigma, task.query_sigma, task.noise
    spread = a @ query @ a
    score = Quadratic(
        torch.sum((A1 @ query) * (sigma @ A1)) + tau2 * spread,
        2.0 * sigma @ A1 @ query @ a,
        spread * sigma,
    )
    value = Quadratic(r1 @ sigma @ r1 + tau2 * v * v, 2.0 * v * sigma @ r1, v * v * sigma)
    square = mean_square(*prediction(parts, task), task)
    return 0.5 * (mean_product(score, value, task.task_cov) + square)


def linear_risk(uv: UV, task: LinearTask, length: float | int) -> Float64[Tensor, ""]:
    """R_L of linear attention, (1/L) sum_l <z_l, U z_q> r^T z_l: R_infinity + linear_variance / L.
    Exact for every (U, V).
    """
    risk = limit_risk(uv, task)
    return risk if math.isinf(length) else risk + linear_variance(uv, task) / length


def block_linear_gradient(
    U: Floats, v: float, task: LinearTask, length: float | int
) -> tuple[float, Floats, float]:
    """``linear_risk`` in the block form with its gradient in U11 and v, without a graph: what a
    gradient flow needs.

        R_L = 1/2 tr(W B Sigma_q B^T) + (v^2 / 2L) tr(((tr(Sigma W) + tau^2) I + Sigma W) Sigma U
        Sigma_q U^T) + tau^2 / 2,

    B = v Sigma U - I.
    """
    sigma, query, W = task.sigma.numpy(), task.query_sigma.numpy(), task.task_cov.numpy()
    moved = sigma @ U
    left = v * moved - np.eye(U.shape[0])
    weighted = W @ left @ query
    value, grad_U, grad_v = (
        0.5 * np.sum(weighted * left),
        v * sigma @ weighted,
        np.sum(weighted * moved),
    )
    if not math.isinf(length):
        inner = ((np.sum(sigma * W) + task.noise) * U + W @ moved) @ query / length
        square = np.sum(inner * moved)
        value, grad_U, grad_v = (
            value + 0.5 * v * v * square,
            grad_U + v * v * sigma @ inner,
            grad_v + v * square,
        )
    return float(value) + 0.5 * task.noise, grad_U, float(grad_v)


def prediction(parts: Active, task: LinearTask) -> tuple[Tensor, Tensor, Tensor]:
    """h(w) = constant + slope w + (w^T Sigma w) (v a)."""
    A1, a, r1, v = parts
    weighted = task.sigma @ r1
    constant = A1.mT @ weighted + task.noise * v * a
    slope = v * A1.mT @ task.sigma + torch.outer(a, weighted)
    return constant, slope, v * a


def mean_square(constant: Tensor, slope: Tensor, a: Tensor, task: LinearTask) -> Tensor:
    """E_{w, x} of (h(w)^T x)^2 for h = constant + slope w + (w^T Sigma w) a: odd moments of w
    vanish.
    """
    sigma, query, W = task.sigma, task.query_sigma, task.task_cov
    mean = torch.sum(sigma * W)
    fourth = mean**2 + 2.0 * torch.trace(sigma @ W @ sigma @ W)
    linear = torch.sum((slope @ W) * (query @ slope))
    return (
        constant @ query @ constant
        + linear
        + fourth * (a @ query @ a)
        + 2.0 * mean * (constant @ query @ a)
    )
