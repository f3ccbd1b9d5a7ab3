"""White coordinates: the parameters of a head as random prompts see them, and the way back for
gradients.

Parameters of a model are o (m), V (m x e), K and Q (k x e), e = d + 1: o is the last row of O, the
only one that acts. A prompt meets them through U = K^T Q without its last column, which meets the
query's 0, and c = V^T o, what the output reads from a token ([S]: v_{d+1} for O = I). With R the
root of Sigma and 1 beside it, ``white`` = R^T [U, c] R, e x e:

    white = [[R^T U_x R, R^T c_x], [U_y R, c_y]] .

A token is z = A g, g ~ N(0, I_e), A g = (R g_x, w^T R g_x + tau g_y).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from esscher.icl.layer import OVKQ
from esscher.icl.tasks import LinearTask
from esscher.icl.training.normals import compiled

__all__ = [
    "Weights",
    "WhiteTask",
    "add_gradient",
    "chain",
    "to_token",
    "weights_of",
    "white_directions",
    "white_task",
    "whiten",
]

Floats = npt.NDArray[np.float64]


class Weights(NamedTuple):
    """o, V, K, Q of a model; of two models, with an axis in front; or a gradient in them."""

    o: Floats
    V: Floats
    K: Floats
    Q: Floats


class WhiteTask(NamedTuple):
    """A linear task: ``root`` (e x e) is R; R^T w = ``task_root`` n (d x d), n ~ N(0, I); ``noise``
    is the deviation tau.
    """

    root: Floats
    task_root: Floats
    noise: float


def weights_of(params: OVKQ) -> Weights:
    """The parameters that act, as arrays of their own."""
    return Weights(
        *(
            np.array(part.numpy(), np.float64)
            for part in (params.O[-1], params.V, params.K, params.Q)
        )
    )


def white_task(task: LinearTask) -> WhiteTask:
    if task.shifted:
        raise ValueError(
            "query_sigma: expected queries of the law of the prompt; a shifted task has risks and"
            " flows only"
        )
    root = np.eye(task.dim + 1)
    root[:-1, :-1] = task.root.numpy()
    return WhiteTask(
        root, np.ascontiguousarray((task.root.T @ task.task_root).numpy()), math.sqrt(task.noise)
    )


@compiled
def multiply(left: Any, right: Any) -> Any:
    """left @ right: at these sizes loops beat a library."""
    out = np.empty((left.shape[0], right.shape[1]))
    for i in range(left.shape[0]):
        for j in range(right.shape[1]):
            total = 0.0
            for k in range(left.shape[1]):
                total += left[i, k] * right[k, j]
            out[i, j] = total
    return out


@compiled
def whiten(weights: Any, root: Any) -> Any:
    """R^T [U without its last column, c] R."""
    joined, o, V = multiply(weights.K.T, weights.Q), weights.o, weights.V
    last = joined.shape[0] - 1
    for i in range(last + 1):
        total = 0.0
        for k in range(o.size):
            total += V[k, i] * o[k]
        joined[i, last] = total
    return multiply(multiply(root.T, joined), root)


@compiled
def chain(weights: Any, root: Any, white: Any) -> Any:
    """The gradient in (o, V, K, Q) from that in ``white``: do = V dc, dV = o dc^T, dK = Q dU^T, dQ
    = K dU.
    """
    joined = multiply(multiply(root, white), root.T)
    last, o, V = joined.shape[0] - 1, weights.o, weights.V
    by_o, by_V = np.zeros(o.size), np.empty(V.shape)
    for k in range(o.size):
        for i in range(last + 1):
            by_o[k] += V[k, i] * joined[i, last]
            by_V[k, i] = o[k] * joined[i, last]
    by_Q = np.zeros(weights.Q.shape)
    by_Q[:, :last] = multiply(weights.K, joined[:, :last])
    return Weights(by_o, by_V, multiply(weights.Q[:, :last], joined[:, :last].T), by_Q)


@compiled
def white_directions(
    white: Any, query: Any, task: Any, noise: float, theta: Any, value: Any
) -> None:
    """A^T theta and A^T c of one model; ``query`` and ``task`` are R^{-1} x_q and R^T w."""
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
def add_gradient(
    slope: float, query: Any, task: Any, noise: float, by_value: Any, by_theta: Any, gradient: Any
) -> None:
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
def to_token(root: Any, task: Any, noise: float, x: Any, out: Any) -> None:
    """out = A x: from white coordinates to those of a token."""
    d = task.size
    out[d] = noise * x[d]
    for i in range(d):
        out[d] += task[i] * x[i]
        out[i] = 0.0
        for k in range(d):
            out[i] += root[i, k] * x[k]
