"""Paired training without tokens: one step on random prompts for softmax and linear attention, compiled, one head each.

Parameters of a model are o (m), V (m x e), K and Q (k x e), e = d + 1: o is the last row of O, the only one that acts.
With U = K^T Q and c = V^T o the loss (f - y)^2 has dK = Q dU^T, dQ = K dU, dV = o dc^T, do = V dc.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from esscher.icl.layer import OVKQ, UV
from esscher.icl.tasks import LinearTask
from esscher.icl.training.kernel import STATISTICS, add_prompts
from esscher.icl.training.normals import compiled, seeded_lanes
from esscher.icl.training.token_sums import new_stream

__all__ = ["ALIVE", "CompiledPair"]

Floats = npt.NDArray[np.float64]
ALIVE = -1  # step of divergence of a model that has not diverged
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # Adam's


@compiled
def multiply(left: Any, right: Any, out: Any) -> None:
    """out = left @ right: at these sizes loops beat a library."""
    for i in range(left.shape[0]):
        for j in range(right.shape[1]):
            total = 0.0
            for k in range(left.shape[1]):
                total += left[i, k] * right[k, j]
            out[i, j] = total


@compiled
def whiten(o: Any, V: Any, K: Any, Q: Any, root: Any, joined: Any, half: Any, white: Any) -> None:
    """white = R^T [U without its last column, c] R with R = blockdiag(root of Sigma, 1)."""
    multiply(K.T, Q, joined)
    last = joined.shape[0] - 1
    for i in range(last + 1):
        total = 0.0
        for k in range(o.size):
            total += V[k, i] * o[k]
        joined[i, last] = total
    multiply(root.T, joined, half)
    multiply(half, root, white)


@compiled
def chain(o: Any, V: Any, K: Any, Q: Any, root: Any, white: Any, half: Any, joined: Any, slopes: Any) -> None:
    """Gradient in (o, V, K, Q) from the gradient in the white parameters."""
    multiply(root, white, half)
    multiply(half, root.T, joined)
    last = joined.shape[0] - 1
    by_o, by_V, by_K, by_Q = slopes
    for k in range(o.size):
        by_o[k] = 0.0
        for i in range(last + 1):
            by_o[k] += V[k, i] * joined[i, last]
            by_V[k, i] = o[k] * joined[i, last]
    multiply(Q[:, :last], joined[:, :last].T, by_K)
    by_Q[:] = 0.0
    multiply(K, joined[:, :last], by_Q[:, :last])


@compiled
def move(weight: Any, slope: Any, mean: Any, square: Any, rate: float, adam: bool, count: int) -> None:
    """One step of SGD or Adam on flat arrays."""
    if not adam:
        for i in range(weight.size):
            weight[i] -= rate * slope[i]
        return
    first, second = 1.0 - BETA1**count, 1.0 - BETA2**count
    for i in range(weight.size):
        mean[i] += (1.0 - BETA1) * (slope[i] - mean[i])
        square[i] += (1.0 - BETA2) * (slope[i] * slope[i] - square[i])
        weight[i] -= rate * (mean[i] / first) / (math.sqrt(square[i] / second) + EPSILON)


@compiled
def advance(
    stream: Any,
    rates: Any,
    begun: int,
    batch: int,
    length: int,
    weights: Any,
    moments: Any,
    adam: bool,
    root: Any,
    task_root: Any,
    noise: float,
    bound: float,
    diverged: Any,
    losses: Any,
) -> None:
    """``rates.size`` steps; ``losses`` (2, steps) gets each batch's loss, NaN for a model that has stopped."""
    o, V, K, Q = weights
    e = root.shape[0]
    white, gradient = np.zeros((2, e, e)), np.zeros((2, e, e))
    joined, half, statistics = np.zeros((e, e)), np.zeros((e, e)), np.zeros(STATISTICS)
    slopes = (np.zeros(o.shape[1]), np.zeros(V.shape[1:]), np.zeros(K.shape[1:]), np.zeros(Q.shape[1:]))
    for step in range(rates.size):
        for model in range(2):
            whiten(o[model], V[model], K[model], Q[model], root, joined, half, white[model])
        gradient[:] = 0.0
        statistics[:] = 0.0
        add_prompts(stream, batch, length, white, task_root, noise, gradient, statistics)
        for model in range(2):
            if diverged[model] >= 0:
                losses[model, step] = np.nan
                continue
            loss = statistics[2 * model] / batch
            losses[model, step] = loss
            if not loss <= bound:
                diverged[model] = begun + step + 1
                continue
            gradient[model] /= batch
            chain(o[model], V[model], K[model], Q[model], root, gradient[model], half, joined, slopes)
            flat = (o[model].ravel(), V[model].ravel(), K[model].ravel(), Q[model].ravel())
            start = 0
            for weight, slope in zip(flat, (slopes[0], slopes[1].ravel(), slopes[2].ravel(), slopes[3].ravel())):  # noqa: B905
                stop = start + weight.size
                mean, square = moments[model, 0, start:stop], moments[model, 1, start:stop]
                move(weight, slope, mean, square, rates[step], adam, begun + step + 1)
                start = stop
        if diverged[0] >= 0 and diverged[1] >= 0:
            losses[:, step + 1 :] = np.nan
            return


class CompiledPair:
    """Softmax and linear attention from the same weights on the same prompts of a linear task.

    ``advance`` trains, ``evaluate`` measures on prompts of its own stream, ``diverged`` holds the step at which a batch's
    loss left the bound, ``ALIVE`` before. A model that diverged is left as it was then.
    """

    def __init__(self, task: LinearTask, length: int, start: OVKQ, *, batch: int, adam: bool, bound: float, seed: int) -> None:
        e = task.dim + 1
        self.root = np.eye(e)
        self.root[:-1, :-1] = task.root.numpy()
        self.task_root = np.ascontiguousarray((task.root.T @ task.task_root).numpy())
        self.noise = math.sqrt(task.noise)
        self.length, self.batch, self.adam, self.bound = length, batch, adam, bound
        self.output = start.O.numpy().copy()  # its other rows have no gradient
        parts = (self.output[-1], start.V.numpy(), start.K.numpy(), start.Q.numpy())
        self.weights = tuple(np.ascontiguousarray(np.stack([part, part]), np.float64) for part in parts)
        self.moments = np.zeros((2, 2, sum(part[0].size for part in self.weights)))
        self.diverged = np.full(2, ALIVE, np.int64)
        self.begun = 0
        self.stream = new_stream(seeded_lanes(seed), e)
        self.fresh = new_stream(seeded_lanes(seed + 1), e)

    def advance(self, rates: Floats) -> Floats:
        """Train for one step per rate; batch losses (2, steps)."""
        losses = np.full((2, rates.size), np.nan)
        advance(
            self.stream,
            rates,
            self.begun,
            self.batch,
            self.length,
            self.weights,
            self.moments,
            self.adam,
            self.root,
            self.task_root,
            self.noise,
            self.bound,
            self.diverged,
            losses,
        )
        self.begun += rates.size
        return losses

    def evaluate(self, prompts: int) -> tuple[Floats, Floats]:
        """Mean squared error of both models on the same fresh prompts, and its standard error."""
        e = self.root.shape[0]
        white, spare, total = np.zeros((2, e, e)), np.zeros((2, e, e)), np.zeros(STATISTICS)
        joined, half = np.zeros((e, e)), np.zeros((e, e))
        for model in range(2):
            o, V, K, Q = (part[model] for part in self.weights)
            whiten(o, V, K, Q, self.root, joined, half, white[model])
        add_prompts(self.fresh, prompts, self.length, white, self.task_root, self.noise, spare, total)
        mean, square = total[0:4:2] / prompts, total[1:4:2] / prompts
        return mean, np.sqrt(np.maximum(square - mean**2, 0.0) / prompts)

    def distance(self) -> float:
        """Squared distance between the parameters of the two models."""
        return float(sum(((part[0] - part[1]) ** 2).sum() for part in self.weights))

    def parameters(self, model: int) -> list[OVKQ]:
        """The one head of a model."""
        o, V, K, Q = (torch.from_numpy(part[model].copy()) for part in self.weights)
        return [OVKQ(torch.cat([torch.from_numpy(self.output[:-1]), o[None]]), V, K, Q)]

    def uv(self, model: int) -> list[UV]:
        return [head.uv() for head in self.parameters(model)]
