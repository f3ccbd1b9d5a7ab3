"""SGD on fresh prompts: softmax and linear attention from the same weights on the same prompts, as
in [S] appendix A.

The loss is the mean squared error E(f - y)^2 of the query's noisy label, so its floor is the
variance of the noise. [S] writes one half of it as the loss of its theory: ``loss="half"`` trains
on that. For SGD it is the same as half the rate: after t steps of rate r the flow of the risk R has
run for a time 2 r t on the square, and r t on its half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from esscher.icl.layer import KINDS, OVKQ, default_weights
from esscher.icl.sampled import Drawn, Responses, batches, respond
from esscher.icl.specs import PAPER, LossName, Optimizer, Schedule
from esscher.icl.tasks import Task
from esscher.inputs import as_count, as_positive

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Settings:
    """How a pair is trained; the defaults are the paper's.

    ``schedule``: "constant", or "linear" or "cosine" down to 0, after ``warmup`` steps up. ``seed``
    decides the weights and, unless ``prompt_seed`` is given, the prompts. ``loss``: "square", or
    "half" of it. ``records`` numbers of training are kept; ``evaluation`` prompts measure the risk
    at each, ``final_evaluation`` at the end. A batch whose loss is not below ``bound`` stops its
    model. Fields are checked here, so they may come as anything.
    """

    steps: Any = PAPER.steps
    batch: Any = PAPER.batch
    rate: Any = PAPER.rate
    optimizer: Any = PAPER.optimizer
    loss: Any = PAPER.loss
    schedule: Any = PAPER.schedule
    warmup: Any = PAPER.warmup
    heads: Any = PAPER.heads
    seed: int = 0
    prompt_seed: int | None = None
    records: Any = PAPER.records
    evaluation: Any = PAPER.evaluation
    final_evaluation: Any = PAPER.final_evaluation
    bound: Any = PAPER.bound

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "heads", "records", "evaluation", "final_evaluation"):
            object.__setattr__(self, name, as_count(getattr(self, name), name))
        for name in ("rate", "bound"):
            object.__setattr__(self, name, as_positive(getattr(self, name), name))
        for name, words in (("optimizer", Optimizer), ("loss", LossName), ("schedule", Schedule)):
            if getattr(self, name) not in get_args(words):
                raise ValueError(
                    f"{name}: expected one of {', '.join(get_args(words))}, got"
                    f" {getattr(self, name)!r}"
                )
        if not 0 <= self.warmup < self.steps:
            raise ValueError(
                f"warmup: expected a number of steps from 0 to below {self.steps}, got"
                f" {self.warmup}"
            )

    @property
    def rates(self) -> Floats:
        """The learning rate of every step."""
        index = np.arange(self.steps, dtype=np.float64)
        rates = np.full(self.steps, self.rate)
        rates[: self.warmup] *= (index[: self.warmup] + 1) / (self.warmup + 1)
        share = (index[self.warmup :] - self.warmup) / (self.steps - self.warmup)
        if self.schedule == "linear":
            rates[self.warmup :] *= 1 - share
        elif self.schedule == "cosine":
            rates[self.warmup :] *= 0.5 * (1 + np.cos(np.pi * share))
        return rates


@dataclass(frozen=True)
class Training:
    """The tables of a training; models are "softmax" and "linear".

    ``curve``: step, model, loss (mean over the batches since the last record), mse and its stderr
    on fresh prompts. ``distance``: step, squared distance between the parameters of the two models.
    ``path``: step, model, values: [U without its last column, last row of O V] row by row, heads
    one after the other. ``final``: a row per model: mse and stderr, status ("ok" or "diverged"),
    step, loss, advice; O, V, K, Q flattened.
    """

    curve: pd.DataFrame
    distance: pd.DataFrame
    path: pd.DataFrame
    final: pd.DataFrame
    parameters: dict[str, list[OVKQ]]

    @property
    def diverged(self) -> pd.DataFrame:
        """The rows of ``final`` of models that diverged."""
        return self.final[self.final["status"] != "ok"]


class TrainingDiverged(ValueError):
    """A model left the bound; ``training`` holds what there is, the other model's included."""

    def __init__(self, training: Training) -> None:
        self.training = training
        super().__init__("; ".join(training.diverged["advice"]))


def train(
    task: Task,
    length: Any,
    settings: Settings | None = None,
    *,
    raise_on_divergence: bool = True,
    progress: Callable[[int, int], object] | None = None,
    **changes: Any,
) -> Training:
    """Train softmax and (1/L) linear attention on the same prompts of ``length`` tokens from the
    same weights.

    ``changes`` are fields of ``Settings``: ``train(task, 20, steps=4000, rate=0.02)``. A model that
    diverges stops, the other goes on. ``progress`` is told (steps done, steps).
    """
    settings = replace(settings or Settings(), **changes)
    pair, rates = Pair(task, as_count(length, "length"), settings), settings.rates
    curve: list[dict[str, Any]] = []
    distance: list[dict[str, Any]] = []
    path: list[dict[str, Any]] = []
    done = 0
    for stop in record_steps(settings.steps, settings.records):
        losses = pair.advance(rates[done:stop], progress)
        done = stop
        mse, stderr = pair.evaluate(settings.evaluation)
        for model, kind in enumerate(KINDS):
            seen = losses[:, model]
            if pair.diverged[model] is None:
                seen = seen[~np.isnan(seen)]
            loss = float(seen.mean()) if seen.size else np.nan
            row = {"step": done, "model": kind}
            curve.append(row | {"loss": loss, "mse": mse[model], "stderr": stderr[model]})
            uvs = [head.uv() for head in pair.parameters(model)]
            joined = [torch.cat([uv.U[:, :-1], uv.V[-1][:, None]], dim=1) for uv in uvs]
            path.append(row | {"values": _flat(joined)})
        distance.append({"step": done, "distance2": pair.distance()})
        if None not in pair.diverged:
            break
    mse, stderr = pair.evaluate(settings.final_evaluation)
    final = []
    for model, kind in enumerate(KINDS):
        at, loss, heads = pair.diverged[model], pair.last[model], pair.parameters(model)
        advice = ""
        if at is not None:
            advice = (
                f"{kind} attention diverged: loss {loss:.3g} at step {at}, above the bound"
                f" {settings.bound:g}; try a rate below {rates.max():g} (such as"
                f" {rates.max() / 4:.2g}), another seed, longer prompts or larger batches"
            )
        row = {"model": kind, "mse": mse[model], "stderr": stderr[model]}
        row |= {"status": "ok" if at is None else "diverged", "step": done if at is None else at}
        row |= {"loss": loss, "advice": advice}
        names = ("O", "V", "K", "Q")
        final.append(row | {name: _flat([getattr(head, name) for head in heads]) for name in names})
    training = Training(
        pd.DataFrame(curve),
        pd.DataFrame(distance),
        pd.DataFrame(path),
        pd.DataFrame(final),
        {kind: pair.parameters(model) for model, kind in enumerate(KINDS)},
    )
    if raise_on_divergence and len(training.diverged):
        raise TrainingDiverged(training)
    return training


class Pair:
    """Softmax (model 0) and linear attention (model 1) from the same weights on the same prompts.

    A model whose loss leaves the bound is kept as it was then. ``diverged``: the step at which each
    model did, None before. Prompts for evaluation come from a generator of their own.
    """

    def __init__(self, task: Task, length: int, settings: Settings) -> None:
        self.task, self.length, self.settings = task, length, settings
        generator = torch.Generator().manual_seed(settings.seed)
        heads = [default_weights(task.dim, generator) for _ in range(settings.heads)]
        self.outputs = [head.O for head in heads]  # only the last row acts and is trained
        self.weights = [
            torch.stack([torch.stack(parts)] * 2)
            for parts in (
                [head.O[-1] for head in heads],
                [head.V for head in heads],
                [head.K for head in heads],
                [head.Q for head in heads],
            )
        ]
        kind: Any = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.SGD
        self.optimizer = kind(self.weights, lr=1.0)
        self.weight = 0.5 if settings.loss == "half" else 1.0
        seed = settings.seed if settings.prompt_seed is None else settings.prompt_seed
        generator = torch.Generator().manual_seed(seed % 2**63)
        self.drawn = batches(
            task, length, settings.batch, settings.steps, generator, settings.heads
        )
        self.fresh = torch.Generator().manual_seed((seed + 1) % 2**63)
        self.begun, self.last = 0, [np.nan, np.nan]
        self.diverged: list[int | None] = [None, None]
        self.stopped: dict[int, list[Tensor]] = {}

    @torch.no_grad()
    def advance(
        self, rates: Floats, progress: Callable[[int, int], object] | None = None
    ) -> Floats:
        """Train for one step per rate; the losses (steps, 2), NaN for a model that has stopped."""
        s, losses = self.settings, np.full((rates.size, 2), np.nan)
        for step, rate in enumerate(rates):
            if None not in self.diverged:
                break
            loss = self._slopes(next(self.drawn))
            self.begun += 1
            for model in range(2):
                if self.diverged[model] is not None:
                    continue
                losses[step, model] = self.last[model] = float(loss[model])
                if not loss[model] <= s.bound:
                    self.diverged[model] = self.begun
                    self.stopped[model] = [part[model].clone() for part in self.weights]
            for model in self.stopped:
                for part in self.weights:
                    part[model] = 0.0
                    part.grad[model] = 0.0  # type: ignore[index]
            self.optimizer.param_groups[0]["lr"] = float(rate)
            self.optimizer.step()
            if progress is not None and (self.begun % 1000 == 0 or step + 1 == rates.size):
                progress(self.begun, s.steps)
        return losses

    def _respond(self, drawn: Drawn) -> Responses:
        o, V, K, Q = self.weights
        theta = drawn.query @ (K.mT @ Q[..., :-1]).mT  # (2, heads, B, e)
        value = (o[..., None, :] @ V)[..., 0, :]
        return respond(drawn, theta.flatten(0, 1).transpose(0, 1), value.flatten(0, 1))

    def _slopes(self, batch: Iterable[Drawn]) -> Floats:
        """Set the gradient of the loss on a batch, and return the two losses.

        With c = V^T o and U = K^T Q: do = V dc, dV = o dc^T, dK = Q dU^T, dQ = K dU.
        """
        o, V, K, Q = self.weights
        loss, by_c = np.zeros(2), torch.zeros_like(V[:, :, 0])
        by_U = torch.zeros_like(K.mT @ Q[..., :-1])
        for drawn in batch:
            found = self._respond(drawn)
            error = found.output - drawn.label[:, None]
            loss += self.weight * (error**2).sum(dim=0).numpy() / self.settings.batch
            slope = 2.0 * self.weight / self.settings.batch * error
            each = slope.repeat_interleave(self.settings.heads, dim=1)[..., None]
            by_c += (each * found.by_value).sum(dim=0).view_as(by_c)
            by_U += ((each * found.by_theta).permute(1, 2, 0) @ drawn.query).view_as(by_U)
        o.grad = (V @ by_c[..., None])[..., 0]
        V.grad = o[..., None] * by_c[..., None, :]
        K.grad = Q[..., :-1] @ by_U.mT
        Q.grad = torch.nn.functional.pad(K @ by_U, (0, 1))
        return loss

    @torch.no_grad()
    def evaluate(self, prompts: int) -> tuple[Floats, Floats]:
        """Mean squared error of both models on the same fresh prompts, and its standard error; NaN
        for a model that has stopped.
        """
        heads, squares = self.settings.heads, []
        for drawn in next(batches(self.task, self.length, prompts, 1, self.fresh, heads)):
            squares.append((self._respond(drawn).output - drawn.label[:, None]) ** 2)
        values = torch.cat(squares).numpy()
        values[:, list(self.stopped)] = np.nan
        return values.mean(axis=0), values.std(axis=0) / np.sqrt(prompts)

    def distance(self) -> float:
        """Squared distance between the parameters of the two models, NaN when one has stopped."""
        if self.stopped:
            return float("nan")
        return float(sum(((part[0] - part[1]) ** 2).sum() for part in self.weights))

    def parameters(self, model: int) -> list[OVKQ]:
        """The heads of a model."""
        o, V, K, Q = self.stopped.get(model) or [part[model].clone() for part in self.weights]
        outputs = [torch.cat([O[:-1], row[None]]) for O, row in zip(self.outputs, o, strict=True)]
        return [OVKQ(*head) for head in zip(outputs, V, K, Q, strict=True)]


def record_steps(steps: int, records: int) -> list[int]:
    """0, the last step, and about ``records`` between: half evenly spaced, half in geometric
    progression.
    """
    even = np.linspace(0, steps, max(2, records // 2 + 1))
    geometric = np.geomspace(1, steps, max(2, records // 2))
    return [int(step) for step in np.unique(np.concatenate([even, geometric]).round())]


def _flat(parts: list[Tensor]) -> list[float]:
    return [float(value) for part in parts for value in part.flatten()]
