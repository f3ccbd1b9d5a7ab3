"""How far softmax attention on a prompt of L tokens is from linear: outputs and gradients at given
weights.

Measured on the same prompts, in mean square: softmax attention on L tokens minus (1/L) linear
attention on the same tokens ("linear"), or minus the limit of both, attention on infinitely many
tokens of the same task ("limit"). [S], Figures 1 and 5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from esscher.icl.layer import OVKQ, tensors
from esscher.icl.risk.exact import risk_gradient
from esscher.icl.risk.softmax_general import product_rule
from esscher.icl.tasks import LinearTask
from esscher.icl.training.normals import compiled
from esscher.icl.training.prompts import draw_prompt, new_prompt
from esscher.icl.training.stream import new_stream
from esscher.icl.training.tokens import new_work
from esscher.icl.training.white import to_token, weights_of, white_directions, white_task, whiten

__all__ = ["AGAINST", "METRICS", "prompt_errors", "risk_gradient_errors"]

Floats = npt.NDArray[np.float64]
METRICS = ("output", "gradient_U", "gradient_V", "gradient", "gradient_K", "gradient_Q")
AGAINST = ("linear", "limit")
LIMIT = 2  # the third model of a prompt, after softmax and linear


def prompt_errors(task: LinearTask, weights: OVKQ, length: int, prompts: int, seed: int) -> Floats:
    """Squared differences on each of some random prompts, (prompts, against, metrics).

    Metrics: output f; df/dU and df/dV (its last row), Frobenius; gradient of the loss (f - y)^2 in
    (O, V, K, Q); df/dK = Q (df/dU)^T and df/dQ = K df/dU [S, after Proposition 3.4].
    """
    acting = weights_of(weights)
    out = np.zeros((prompts, len(AGAINST), len(METRICS)))
    measure_prompts(new_stream(seed, task.dim + 1), length, white_task(task), acting, out)
    return out


@compiled
def measure_prompts(stream: Any, length: int, task: Any, weights: Any, out: Any) -> None:
    """Rows of ``out`` (prompts, against, metrics): squared differences between softmax and the
    others.
    """
    white = whiten(weights, task.root)
    size = white.shape[0]
    d = size - 1
    work, prompt = new_work(length, size - 2), new_prompt(size, 3)
    by_V, by_U, query = np.zeros((3, size)), np.zeros((3, size)), np.zeros(d)
    for row in range(out.shape[0]):
        label = draw_prompt(stream, (white, white), task, work, prompt)
        take_limit(white, task, prompt)
        for model in range(3):
            to_token(task.root, prompt.task, task.noise, prompt.by_value[model], by_V[model])
            to_token(task.root, prompt.task, task.noise, prompt.by_theta[model], by_U[model])
        for i in range(d):
            query[i] = 0.0
            for k in range(d):
                query[i] += task.root[i, k] * prompt.query[k]
        own = prompt.outputs[0]
        for other in range(2):
            output = prompt.outputs[1 + other]
            out[row, other, 0] = (own - output) ** 2
            out[row, other, 1] = square(by_U[0] - by_U[1 + other]) * square(query)
            out[row, other, 2] = square(by_V[0] - by_V[1 + other])
            change_V = 2.0 * (own - label) * by_V[0] - 2.0 * (output - label) * by_V[1 + other]
            change_U = 2.0 * (own - label) * by_U[0] - 2.0 * (output - label) * by_U[1 + other]
            out[row, other, 3] = square_gradient(weights, query, change_V, change_U)
            moved = by_U[0] - by_U[1 + other]
            out[row, other, 4] = square_image(weights.Q, query) * square(moved)
            out[row, other, 5] = square_image(weights.K, moved) * square(query)


@compiled
def take_limit(white: Any, task: Any, prompt: Any) -> None:
    """Output and gradients on infinitely many tokens: S = I in white coordinates, so df/dc = A^T
    theta, df/dtheta = A^T c.
    """
    by_value, by_theta = prompt.by_value[LIMIT], prompt.by_theta[LIMIT]
    white_directions(white, prompt.query, prompt.task, task.noise, by_value, by_theta)
    prompt.outputs[LIMIT] = 0.0
    for k in range(by_value.size):
        prompt.outputs[LIMIT] += by_value[k] * by_theta[k]


@compiled
def square_gradient(weights: Any, query: Any, by_V: Any, by_U: Any) -> float:
    """Squared norm of the gradient in (O, V, K, Q) whose gradient in c is ``by_V`` and in U is
    ``by_U query^T``.
    """
    return (
        square(weights.o) * square(by_V)
        + square_image(weights.V, by_V)
        + square_image(weights.Q, query) * square(by_U)
        + square_image(weights.K, by_U) * square(query)
    )


@compiled
def square(x: Any) -> float:
    total = 0.0
    for value in x:
        total += value * value
    return total


@compiled
def square_image(matrix: Any, x: Any) -> float:
    """|matrix x|^2, with the columns of ``matrix`` beyond x left out."""
    total = 0.0
    for i in range(matrix.shape[0]):
        image = 0.0
        for k in range(x.size):
            image += matrix[i, k] * x[k]
        total += image * image
    return total


def risk_gradient_errors(task: LinearTask, weights: OVKQ, length: int) -> Floats:
    """Norm of the difference of the exact gradients of the mean squared error in (O, V, K, Q): to
    linear, to the limit.
    """
    rule = product_rule(task.dim)
    at = [(length, "softmax"), (length, "linear"), (float("inf"), "softmax")]
    gradients = [tensors(risk_gradient(task, weights, n, kind, rule)[1]) for n, kind in at]
    # the risk is half of the mean squared error
    return np.array(
        [
            2
            * sum(float(((a - b) ** 2).sum()) for a, b in zip(gradients[0], other, strict=True))
            ** 0.5
            for other in gradients[1:]
        ]
    )
