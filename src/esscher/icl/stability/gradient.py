"""The population risk and its gradient in (o, V, K, Q), compiled: what flows from hundreds of first
weights need.

In white coordinates (``training.white``) the score of a token g' ~ N(0, I_{d+1}) is <theta, g'> and
its value <c, g'>. With omega = R^T w the task, x_q = R g the query and ``white`` = [[A, r], [a^T,
v]],

    theta = B g,   B = [A + omega a^T; tau a^T],   c = (r + v omega, tau v),   label = <omega, g> .

For infinite prompts and for linear attention the average over g is a norm, and what is left is a
polynomial of degree 4 in omega, which the cubature integrates exactly:

    R_infinity = 1/2 E|B^T c - omega|^2 + tau^2/2,     R_L = R_infinity + (1/2L) E[ |c|^2 |B|_F^2 +
    |B^T c|^2 ]  (linear) .

Softmax attention adds the excess of ``risk.softmax_block`` with s = |theta|, kappa = <c, theta>,
averaged over the product of a cubature of tasks and one of queries. It is as good as exact near the
block form, which is polynomial in omega.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from esscher.icl.risk.cubature import gaussian_cubature
from esscher.icl.risk.error_table import table
from esscher.icl.tasks import LinearTask
from esscher.icl.training.normals import compiled
from esscher.icl.training.white import Weights, chain, white_task, whiten

__all__ = ["PopulationRisk"]

Floats = npt.NDArray[np.float64]
# two shells are exact for the fourth degree; more of either change the excess by 1e-4
TASK_SHELLS, QUERY_SHELLS = 2, 4


class PopulationRisk:
    """R_L of one kind of attention as a function of ``white`` or of (o, V, K, Q); ``length`` may be
    infinite.
    """

    def __init__(self, task: LinearTask, length: float | int, kind: str, seed: int = 0) -> None:
        self.task, self.length = white_task(task), length
        self.share = 1.0 / length if kind == "linear" else 0.0
        self.excess = kind == "softmax" and not math.isinf(length)
        tasks = gaussian_cubature(task.dim, 1, TASK_SHELLS, seed)
        queries = gaussian_cubature(task.dim, 1, QUERY_SHELLS, seed + 1, True)
        self.tasks = np.ascontiguousarray(tasks.points[0].numpy() @ self.task.task_root.T)
        self.queries = np.ascontiguousarray(queries.points[0].numpy())
        self.task_weights, self.query_weights = tasks.weights.numpy(), queries.weights.numpy()

    def white(self, white: Floats) -> tuple[float, Floats]:
        """The risk and its gradient at the matrix ``white``."""
        gradient, noise = np.zeros_like(white), self.task.noise
        risk = add_polynomial(white, self.tasks, self.task_weights, noise, self.share, gradient)
        if self.excess:
            errors = table(int(self.length)).evaluate(
                deviations(white, self.tasks, self.queries, noise)
            )
            rule = self.tasks, self.task_weights, self.queries, self.query_weights
            risk += add_excess(white, rule, errors, noise, gradient)
        return risk, gradient

    def __call__(self, weights: Weights) -> tuple[float, Weights]:
        """The risk and its gradient in (o, V, K, Q)."""
        root = self.task.root
        risk, gradient = self.white(whiten(weights, root))
        return risk, chain(weights, root, gradient)


@compiled
def task_maps(white: Any, task: Any, noise: float, B: Any, c: Any) -> None:
    """Fill B and c for one task."""
    d = task.size
    c[d] = noise * white[d, d]
    for i in range(d):
        c[i] = white[i, d] + white[d, d] * task[i]
        B[d, i] = noise * white[d, i]
        for k in range(d):
            B[i, k] = white[i, k] + task[i] * white[d, k]


@compiled
def add_back(weight: float, task: Any, noise: float, by_B: Any, by_c: Any, gradient: Any) -> None:
    """Add ``weight`` times the gradient in ``white`` that the gradients in B and c give."""
    d = task.size
    for i in range(d):
        gradient[i, d] += weight * by_c[i]
        gradient[d, d] += weight * task[i] * by_c[i]
        gradient[d, i] += weight * noise * by_B[d, i]
        for k in range(d):
            gradient[i, k] += weight * by_B[i, k]
            gradient[d, k] += weight * task[i] * by_B[i, k]
    gradient[d, d] += weight * noise * by_c[d]


@compiled
def add_polynomial(
    white: Any, tasks: Any, weights: Any, noise: float, share: float, gradient: Any
) -> float:
    """R_infinity + ``share`` L (R_L - R_infinity) of linear attention; its gradient is added to
    ``gradient``.
    """
    d = tasks.shape[1]
    B, c, by_B, by_c = np.empty((d + 1, d)), np.empty(d + 1), np.empty((d + 1, d)), np.empty(d + 1)
    pull = np.empty(d)
    total = 0.5 * noise * noise
    for n in range(tasks.shape[0]):
        task_maps(white, tasks[n], noise, B, c)
        scores, values, loss = np.sum(B * B), np.sum(c * c), 0.0
        for k in range(d):
            output = np.sum(B[:, k] * c)
            miss = output - tasks[n, k]
            pull[k] = miss + share * output
            loss += miss * miss + share * output * output
        for i in range(d + 1):
            by_c[i] = share * scores * c[i]
            for k in range(d):
                by_c[i] += B[i, k] * pull[k]
                by_B[i, k] = c[i] * pull[k] + share * values * B[i, k]
        add_back(weights[n], tasks[n], noise, by_B, by_c, gradient)
        total += 0.5 * weights[n] * (loss + share * scores * values)
    return total


@compiled
def deviations(white: Any, tasks: Any, queries: Any, noise: float) -> Any:
    """s = |B g| for every task and query."""
    d = tasks.shape[1]
    B, c, s = np.empty((d + 1, d)), np.empty(d + 1), np.empty((tasks.shape[0], queries.shape[0]))
    for n in range(tasks.shape[0]):
        task_maps(white, tasks[n], noise, B, c)
        for q in range(queries.shape[0]):
            square = 0.0
            for i in range(d + 1):
                theta = 0.0
                for k in range(d):
                    theta += B[i, k] * queries[q, k]
                square += theta * theta
            # below it f1 - f2 has no digits left, and kappa/s is bounded by |c|
            s[n, q] = max(math.sqrt(square), 1e-6)
    return s


@compiled
def add_excess(white: Any, rule: Any, errors: Any, noise: float, gradient: Any) -> float:
    """E 1/2 (f2 |c|^2 + (f1 - f2) kappa^2/s^2 - 2 f2 kappa (kappa - label)); its gradient is added
    to ``gradient``.
    """
    tasks, task_weights, queries, query_weights = rule
    d = tasks.shape[1]
    B, c, by_B, by_c = np.empty((d + 1, d)), np.empty(d + 1), np.empty((d + 1, d)), np.empty(d + 1)
    theta, total = np.empty(d + 1), 0.0
    for n in range(tasks.shape[0]):
        task_maps(white, tasks[n], noise, B, c)
        by_B[:], by_c[:], values, mean = 0.0, 0.0, np.sum(c * c), 0.0
        for q in range(queries.shape[0]):
            query, weight = queries[q], query_weights[q]
            f1, f2, slope1, slope2 = (
                errors[0][n, q],
                errors[1][n, q],
                errors[2][n, q],
                errors[3][n, q],
            )
            square, kappa, label = 0.0, 0.0, 0.0
            for k in range(d):
                label += tasks[n, k] * query[k]
            for i in range(d + 1):
                theta[i] = 0.0
                for k in range(d):
                    theta[i] += B[i, k] * query[k]
                square += theta[i] * theta[i]
                kappa += theta[i] * c[i]
            s = max(math.sqrt(square), 1e-6)
            part, along, miss = (kappa / s) ** 2, f1 - f2, kappa - label
            mean += 0.5 * weight * (f2 * values + along * part - 2.0 * f2 * kappa * miss)
            by_kappa = weight * (along * kappa / s**2 - f2 * (kappa + miss))
            by_s = (
                0.5 * (slope2 * values + (slope1 - slope2) * part)
                - along * part / s
                - slope2 * kappa * miss
            )
            by_s *= weight / s
            for i in range(d + 1):
                by_c[i] += weight * f2 * c[i] + by_kappa * theta[i]
                by_theta = by_kappa * c[i] + by_s * theta[i]
                for k in range(d):
                    by_B[i, k] += by_theta * query[k]
        add_back(task_weights[n], tasks[n], noise, by_B, by_c, gradient)
        total += task_weights[n] * mean
    return total
