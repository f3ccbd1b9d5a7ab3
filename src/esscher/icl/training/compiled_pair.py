"""Paired training without tokens: a step on random prompts for softmax and linear attention,
compiled, one head each.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from esscher.icl.layer import OVKQ, UV
from esscher.icl.tasks import LinearTask
from esscher.icl.training.normals import compiled
from esscher.icl.training.pair import ALIVE, Step
from esscher.icl.training.prompts import add_prompts, new_totals
from esscher.icl.training.stream import Stream, new_stream
from esscher.icl.training.white import Weights, WhiteTask, chain, weights_of, white_task, whiten

__all__ = ["CompiledPair"]

Floats = npt.NDArray[np.float64]
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # Adam's


class Setting(NamedTuple):
    """What stays the same while a pair trains."""

    task: WhiteTask
    length: int
    batch: int
    adam: bool
    bound: float
    weight: float = 1.0  # of the squared error in the loss


class State(NamedTuple):
    """What training moves; of weights and Adam's moments the first axis is the model."""

    stream: Stream
    weights: Weights
    mean: Weights
    square: Weights
    diverged: npt.NDArray[np.int64]


@compiled
def of_model(weights: Any, model: int) -> Any:
    """Views of the weights of one model."""
    return Weights(weights.o[model], weights.V[model], weights.K[model], weights.Q[model])


@compiled
def flat(weights: Any) -> Any:
    return weights.o, weights.V.ravel(), weights.K.ravel(), weights.Q.ravel()


@compiled
def whiten_both(weights: Any, root: Any) -> Any:
    size = root.shape[0]
    white = np.empty((2, size, size))
    for model in range(2):
        white[model] = whiten(of_model(weights, model), root)
    return white


@compiled
def move(
    weight: Any, slope: Any, mean: Any, square: Any, rate: float, adam: bool, count: int
) -> None:
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
def advance(setting: Any, state: Any, begun: int, rates: Any, losses: Any) -> None:
    """``rates.size`` steps; ``losses`` (2, steps) gets each batch's loss, NaN for a model that has
    stopped.
    """
    root, diverged = setting.task.root, state.diverged
    for step in range(rates.size):
        totals = new_totals(root.shape[0])
        white = whiten_both(state.weights, root)
        add_prompts(state.stream, setting.batch, setting.length, white, setting.task, totals)
        for model in range(2):
            if diverged[model] >= 0:
                losses[model, step] = np.nan
                continue
            losses[model, step] = setting.weight * totals.loss[model] / setting.batch
            if not losses[model, step] <= setting.bound:
                diverged[model] = begun + step + 1
                continue
            weights = of_model(state.weights, model)
            slopes = chain(weights, root, setting.weight * totals.gradient[model] / setting.batch)
            means, squares = of_model(state.mean, model), of_model(state.square, model)
            for weight, slope, mean, square in zip(  # noqa: B905
                flat(weights), flat(slopes), flat(means), flat(squares)
            ):
                move(weight, slope, mean, square, rates[step], setting.adam, begun + step + 1)
        if diverged[0] >= 0 and diverged[1] >= 0:
            losses[:, step + 1 :] = np.nan
            return


class CompiledPair:
    """A ``Pair`` of one head each on a linear task; fresh prompts for evaluation come from a stream
    of their own.
    """

    def __init__(self, task: LinearTask, length: int, start: OVKQ, step: Step) -> None:
        self.setting = Setting(
            white_task(task), length, step.batch, step.adam, step.bound, step.weight
        )
        self.step, self.begun = step, 0
        self.diverged = np.full(2, ALIVE, np.int64)
        self.output = start.O.numpy().copy()  # its rows but the last have no gradient
        self.weights = Weights(*(np.stack([part, part]) for part in weights_of(start)))
        mean, square = (Weights(*(np.zeros_like(part) for part in self.weights)) for _ in range(2))
        self.state = State(
            new_stream(step.seed, task.dim + 1), self.weights, mean, square, self.diverged
        )
        self.fresh = new_stream(step.seed + 1, task.dim + 1)

    def advance(self, rates: Floats) -> Floats:
        losses = np.full((2, rates.size), np.nan)
        advance(self.setting, self.state, self.begun, rates, losses)
        self.begun += rates.size
        return losses

    def evaluate(self, prompts: int) -> tuple[Floats, Floats]:
        task = self.setting.task
        totals = new_totals(task.root.shape[0])
        add_prompts(
            self.fresh,
            prompts,
            self.setting.length,
            whiten_both(self.weights, task.root),
            task,
            totals,
        )
        mean, square = totals.loss / prompts, totals.square / prompts
        return mean, np.sqrt(np.maximum(square - mean**2, 0.0) / prompts)

    def distance(self) -> float:
        return float(sum(((part[0] - part[1]) ** 2).sum() for part in self.weights))

    def parameters(self, model: int) -> list[OVKQ]:
        o, V, K, Q = (torch.from_numpy(part[model].copy()) for part in self.weights)
        return [OVKQ(torch.cat([torch.from_numpy(self.output[:-1]), o[None]]), V, K, Q)]

    def uv(self, model: int) -> list[UV]:
        return [head.uv() for head in self.parameters(model)]
