"""Losses and gradients of softmax and linear attention on the same random prompts, drawn without
drawing their tokens.

In white coordinates a token is z = A g with g ~ N(0, I_D), D = d + 1 (``white``). With theta = U
x_q and c the value direction, softmax attention needs

    f = sum_j p_j c^T z_j,   df/dc = sum_j p_j z_j,   df/dtheta = sum_j p_j (c^T z_j) z_j - f sum_j
    p_j z_j

and linear attention f = c^T S theta, df/dc = S theta, df/dtheta = S c with S = (1/L) sum_j z_j
z_j^T. Rotate g so that A^T theta of softmax lies on the first axis and A^T c in the span of the
first two. Then p_j is a function of the first coordinate, and the other D - 2, collected in Q (L x
(D - 2)), are N(0, I) given the first two. They enter through

    W^T Q,  W = (g_1, g_2, p, p c^T z) an L x 4 matrix,   and   Q^T Q = (P_W Q)^T (P_W Q) +
    Wishart(L - rank W)

by Cochran's theorem: W^T Q = C N with C the Cholesky factor of W^T W and N Gaussian, P_W Q = the
same N in another basis, and Bartlett's factor is the rest. So a token costs two normals and one
exponential whatever d is, and the joint law of all outputs and gradients of both models is that of
L tokens, exactly, up to float32 rounding in the token sums. Short prompts (L < SHORT, or too short
for Bartlett) draw Q itself.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from esscher.icl.training.normals import compiled
from esscher.icl.training.stream import take
from esscher.icl.training.token_sums import Reading
from esscher.icl.training.tokens import apply_factors, apply_symmetric, draw_tokens, new_work
from esscher.icl.training.white import add_gradient, white_directions

__all__ = [
    "Prompt",
    "Totals",
    "add_prompts",
    "draw_prompt",
    "new_prompt",
    "new_totals",
    "reflect",
    "reflector",
]

Floats = npt.NDArray[np.float64]


class Prompt(NamedTuple):
    """One prompt in white coordinates: its query, its task, and of each model (softmax, linear,
    ...) output and gradients.
    """

    query: Floats  # d
    task: Floats  # d
    theta: Floats  # models x D: A^T theta
    value: Floats  # models x D: A^T c
    mirrors: Floats  # 2 x D: the reflections that rotate
    outputs: Floats  # models: f
    by_value: Floats  # models x D: df/dc
    by_theta: Floats  # models x D: df/dtheta


class Totals(NamedTuple):
    """Sums over prompts, softmax first: gradients of the loss (f - y)^2 in ``white``, losses,
    squares of losses.
    """

    gradient: Floats  # 2 x D x D
    loss: Floats  # 2
    square: Floats  # 2


@compiled
def new_prompt(size: int, models: int) -> Any:
    """Arrays for prompts in D = ``size`` dimensions."""
    d = size - 1
    theta, value, by_value, by_theta = (
        np.zeros((models, size)),
        np.zeros((models, size)),
        np.zeros((models, size)),
        np.zeros((models, size)),
    )
    return Prompt(
        np.zeros(d),
        np.zeros(d),
        theta,
        value,
        np.zeros((2, size)),
        np.zeros(models),
        by_value,
        by_theta,
    )


@compiled
def new_totals(size: int) -> Any:
    return Totals(np.zeros((2, size, size)), np.zeros(2), np.zeros(2))


@compiled
def reflector(x: Any, start: int, h: Any) -> float:
    """h with (I - 2 h h^T) x = value e_start on the coordinates from ``start`` on; returns the
    value (Householder).
    """
    norm = 0.0
    for i in range(start, x.size):
        norm += x[i] * x[i]
        h[i] = x[i]
    norm = math.sqrt(norm)
    for i in range(start):
        h[i] = 0.0
    value = -norm if x[start] > 0 else norm
    h[start] -= value
    length = 0.0
    for i in range(start, x.size):
        length += h[i] * h[i]
    length = math.sqrt(length)
    if length > 0.0:
        for i in range(start, x.size):
            h[i] /= length
    return value


@compiled
def dot(x: Any, y: Any) -> float:
    total = 0.0
    for i in range(x.size):
        total += x[i] * y[i]
    return total


@compiled
def reflect(h: Any, x: Any) -> None:
    """x - 2 h h^T x in place of x."""
    product = dot(h, x)
    for i in range(x.size):
        x[i] -= 2.0 * product * h[i]


@compiled
def softmax_moments(sums: Any, reading: Any, linear: Any, first: Any, second: Any) -> Any:
    """f, first = sum_j p_j g_j and second = sum_j p_j a_j g_j - f first, rotated."""
    first[0], first[1] = sums.e_g1 / sums.e, sums.e_g2 / sums.e
    output = reading.along * first[0] + reading.across * first[1]
    second[0] = (reading.along * sums.e_g11 + reading.across * sums.e_g12) / sums.e
    second[1] = (reading.along * sums.e_g12 + reading.across * sums.e_g22) / sums.e
    for k in range(linear.shape[1]):
        first[2 + k] = linear[2, k] / sums.e
        second[2 + k] = linear[3, k] / sums.e
    for k in range(first.size):
        second[k] -= output * first[k]
    return output


@compiled
def second_moment(sums: Any, work: Any, x: Any, out: Any) -> None:
    """out = (1/L) sum_j g_j g_j^T x in the rotated coordinates."""
    linear = work.linear
    if work.short:
        apply_symmetric(work.square, x[2:], out[2:])
    else:
        apply_factors(work.normal, work.square, x[2:], out[2:])
    out[0] = sums.g11 * x[0] + sums.g12 * x[1]
    out[1] = sums.g12 * x[0] + sums.g22 * x[1]
    for k in range(linear.shape[1]):
        out[0] += linear[0, k] * x[2 + k]
        out[1] += linear[1, k] * x[2 + k]
        out[2 + k] += linear[0, k] * x[0] + linear[1, k] * x[1]
    for k in range(x.size):
        out[k] /= work.length


@compiled
def draw_task(stream: Any, root: Any, noise: float, query: Any, task: Any) -> Any:
    """Fill the query and the task of a prompt; its label."""
    d = query.size
    drawn = take(stream, 2 * d + 1)
    label = noise * float(drawn[2 * d])
    for i in range(d):
        query[i] = drawn[i]
    for i in range(d):
        task[i] = 0.0
        for k in range(d):
            task[i] += root[i, k] * float(drawn[d + k])
        label += task[i] * query[i]
    return label


@compiled
def draw_prompt(stream: Any, white: Any, task: Any, work: Any, prompt: Any) -> Any:
    """One prompt: fills all of ``prompt`` for softmax with ``white[0]`` and linear attention with
    ``white[1]``; the label.
    """
    query, direction, noise = prompt.query, prompt.task, task.noise
    label = draw_task(stream, task.task_root, noise, query, direction)
    theta, value, theta2, value2 = (
        prompt.theta[0],
        prompt.value[0],
        prompt.theta[1],
        prompt.value[1],
    )
    white_directions(white[0], query, direction, noise, theta, value)
    white_directions(white[1], query, direction, noise, theta2, value2)
    one, two = prompt.mirrors[0], prompt.mirrors[1]
    score = reflector(theta, 0, one)
    reflect(one, value)
    reading = Reading(score, value[0], reflector(value, 1, two))
    for vector in (theta2, value2):
        reflect(one, vector)
        reflect(two, vector)
    sums = draw_tokens(stream, reading, work)
    by_value, by_theta, by_value2, by_theta2 = (
        prompt.by_value[0],
        prompt.by_theta[0],
        prompt.by_value[1],
        prompt.by_theta[1],
    )
    prompt.outputs[0] = softmax_moments(sums, reading, work.linear, by_value, by_theta)
    second_moment(sums, work, theta2, by_value2)
    second_moment(sums, work, value2, by_theta2)
    prompt.outputs[1] = dot(value2, by_value2)
    for vector in (by_value, by_theta, by_value2, by_theta2):
        reflect(two, vector)
        reflect(one, vector)
    return label


@compiled
def add_prompts(stream: Any, batch: int, length: int, white: Any, task: Any, totals: Any) -> None:
    """Draw ``batch`` prompts of ``length`` tokens and add them to ``totals``; ``white`` (2, D, D)
    are the two models.
    """
    size = white.shape[1]
    work, prompt = new_work(length, size - 2), new_prompt(size, 2)
    query, direction, noise = prompt.query, prompt.task, task.noise
    for _ in range(batch):
        label = draw_prompt(stream, white, task, work, prompt)
        for model in range(2):
            error = prompt.outputs[model] - label
            by_value, by_theta = prompt.by_value[model], prompt.by_theta[model]
            add_gradient(
                2.0 * error, query, direction, noise, by_value, by_theta, totals.gradient[model]
            )
            totals.loss[model] += error**2
            totals.square[model] += error**4
