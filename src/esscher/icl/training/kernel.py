"""Losses and gradients of softmax and linear attention on the same random prompts, drawn without drawing their tokens.

In white coordinates a token is z = A g with g ~ N(0, I_D), D = d + 1, z = (x, y), A g = (R g_x, w^T R g_x + tau g_y),
Sigma = R R^T. With theta = U x_q and c the value direction (c^T V-row of the output), softmax attention needs

    f = sum_j p_j c^T z_j,   df/dc = sum_j p_j z_j,   df/dtheta = sum_j p_j (c^T z_j) z_j - f sum_j p_j z_j

and linear attention f = c^T S theta, df/dc = S theta, df/dtheta = S c with S = (1/L) sum_j z_j z_j^T. Rotate g so that
A^T theta of softmax lies on the first axis and A^T c in the span of the first two. Then p_j is a function of the first
coordinate, and the other D - 2, collected in Q (L x (D - 2)), are N(0, I) given the first two. They enter through

    W^T Q,  W = (g_1, g_2, p, p c^T z) an L x 4 matrix,   and   Q^T Q = (P_W Q)^T (P_W Q) + Wishart(L - rank W)

by Cochran's theorem: W^T Q = C N with C the Cholesky factor of W^T W and N Gaussian, P_W Q = the same N in another
basis, and Bartlett's factor is the rest. So a token costs two normals and one exponential whatever d is, and the joint
law of all outputs and gradients of both models is that of L tokens, exactly, up to float32 rounding in the token sums.
Short prompts (L < SHORT, or too short for Bartlett) draw Q itself.

    U  D x d  key-query product without the column that meets the query's 0      (paper's U)
    c  D      what the output reads from a token: last row of O times V          (paper's v_{d+1} for O = I)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from esscher.icl.training.normals import compiled
from esscher.icl.training.token_sums import apply_square, draw_tokens, is_short, new_work, take

__all__ = ["STATISTICS", "add_gradient", "add_prompts", "draw_prompt", "new_prompt", "reflect", "reflector", "white_directions"]

STATISTICS = 4  # sums of: loss of softmax, its square, loss of linear, its square


@compiled
def reflector(x: Any, start: int, h: Any) -> float:
    """h with (I - 2 h h^T) x = value e_start on the coordinates from ``start`` on; returns the value (Householder)."""
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
def reflect(h: Any, x: Any) -> None:
    product = 0.0
    for i in range(x.size):
        product += h[i] * x[i]
    for i in range(x.size):
        x[i] -= 2.0 * product * h[i]


@compiled
def second_moment(work: Any, short: bool, length: int, x: Any, out: Any) -> None:
    """out = (1/L) sum_j g_j g_j^T x in the rotated coordinates."""
    sums, linear = work[0], work[2]
    apply_square(work, short, x[2:], out[2:])
    out[0] = sums[9] * x[0] + sums[10] * x[1]
    out[1] = sums[10] * x[0] + sums[11] * x[1]
    for k in range(linear.shape[1]):
        out[0] += linear[0, k] * x[2 + k]
        out[1] += linear[1, k] * x[2 + k]
        out[2 + k] += linear[0, k] * x[0] + linear[1, k] * x[1]
    for k in range(x.size):
        out[k] /= length


@compiled
def softmax_moments(work: Any, along: float, across: float, first: Any, second: Any) -> Any:
    """f, first = sum_j p_j g_j and second = sum_j p_j a_j g_j - f first, rotated."""
    sums, linear = work[0], work[2]
    total = sums[0]
    first[0], first[1] = sums[1] / total, sums[2] / total
    output = along * first[0] + across * first[1]
    second[0] = (along * sums[3] + across * sums[4]) / total
    second[1] = (along * sums[4] + across * sums[5]) / total
    for k in range(linear.shape[1]):
        first[2 + k] = linear[2, k] / total
        second[2 + k] = linear[3, k] / total
    for k in range(first.size):
        second[k] -= output * first[k]
    return output


@compiled
def white_directions(white: Any, query: Any, task: Any, noise: float, theta: Any, value: Any) -> None:
    """A^T theta and A^T c of one model; ``white`` is (R^T U_x R, R^T U_y^T, R^T c_x, c_y) in one array."""
    d = query.size
    tilt = 0.0
    for k in range(d):
        tilt += white[d, k] * query[k]
    for i in range(d):
        total = 0.0
        for k in range(d):
            total += white[i, k] * query[k]
        theta[i] = total + tilt * task[i]
        value[i] = white[i, d] + white[d, d] * task[i]
    theta[d] = noise * tilt
    value[d] = noise * white[d, d]


@compiled
def add_gradient(slope: float, query: Any, task: Any, noise: float, by_value: Any, by_theta: Any, gradient: Any) -> None:
    """Add ``slope`` times df/d(white) to ``gradient``, laid out as ``white``."""
    d = query.size
    last_value, last_theta = noise * by_value[d], noise * by_theta[d]
    for i in range(d):
        last_value += task[i] * by_value[i]
        last_theta += task[i] * by_theta[i]
        gradient[i, d] += slope * by_value[i]
        step = slope * by_theta[i]
        for k in range(d):
            gradient[i, k] += step * query[k]
    gradient[d, d] += slope * last_value
    for k in range(d):
        gradient[d, k] += slope * last_theta * query[k]


@compiled
def new_prompt(size: int) -> Any:
    """Arrays of one prompt: query, task, directions of both models, the two reflections."""
    d = size - 1
    return (
        np.zeros(d),
        np.zeros(d),
        np.zeros(size),
        np.zeros(size),
        np.zeros(size),
        np.zeros(size),
        np.zeros(size),
        np.zeros(size),
    )


@compiled
def draw_prompt(
    stream: Any, length: int, white: Any, task_root: Any, noise: float, work: Any, prompt: Any, outputs: Any, slopes: Any
) -> float:
    """One prompt: fills ``outputs`` (2) and ``slopes`` (2, 2, D), df/dc and df/dtheta in white coordinates; the label."""
    query, task, theta, value, theta2, value2, h1, h2 = prompt
    d = query.size
    drawn = take(stream, 2 * d + 1)
    label = noise * float(drawn[2 * d])
    for i in range(d):
        query[i] = drawn[i]
    for i in range(d):
        task[i] = 0.0
        for k in range(d):
            task[i] += task_root[i, k] * float(drawn[d + k])
        label += task[i] * query[i]
    white_directions(white[0], query, task, noise, theta, value)
    white_directions(white[1], query, task, noise, theta2, value2)
    score = reflector(theta, 0, h1)
    reflect(h1, value)
    along = value[0]
    across = reflector(value, 1, h2)
    for vector in (theta2, value2):
        reflect(h1, vector)
        reflect(h2, vector)
    draw_tokens(stream, length, score, along, across, work)
    outputs[0] = softmax_moments(work, along, across, slopes[0, 0], slopes[0, 1])
    short = is_short(length, d - 1)
    second_moment(work, short, length, theta2, slopes[1, 0])
    second_moment(work, short, length, value2, slopes[1, 1])
    outputs[1] = 0.0
    for k in range(d + 1):
        outputs[1] += value2[k] * slopes[1, 0, k]
    for model in range(2):
        for which in range(2):
            reflect(h2, slopes[model, which])
            reflect(h1, slopes[model, which])
    return label


@compiled
def add_prompts(
    stream: Any, batch: int, length: int, white: Any, task_root: Any, noise: float, gradient: Any, statistics: Any
) -> None:
    """Draw ``batch`` prompts; add sums over them of both models' gradients of (f - y)^2 and of losses.

    ``white`` (2, D, D): softmax's and linear's parameters, [[R^T U_x R, R^T c_x], [U_y R, c_y]]; ``gradient`` alike.
    ``task_root`` (d, d): w has white coordinates R^T w = task_root n, n ~ N(0, I). ``noise`` is tau.
    """
    size = white.shape[1]
    work, prompt = new_work(length, size - 2), new_prompt(size)
    outputs, slopes = np.zeros(2), np.zeros((2, 2, size))
    for _ in range(batch):
        label = draw_prompt(stream, length, white, task_root, noise, work, prompt, outputs, slopes)
        for model in range(2):
            error = outputs[model] - label
            add_gradient(2.0 * error, prompt[0], prompt[1], noise, slopes[model, 0], slopes[model, 1], gradient[model])
            statistics[2 * model] += error**2
            statistics[2 * model + 1] += error**4
