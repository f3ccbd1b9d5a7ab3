"""SGD on fresh prompts: softmax and linear attention from the same weights on the same prompts, as in [S] appendix A.

The loss is the mean squared error E(f - y)^2 of the query's noisy label, so its floor is the variance of the noise; the
risk of [S] is half of it. Defaults are the paper's: rate 1e-3, 500 000 steps, batches of 128 prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from esscher.icl.layer import KINDS, OVKQ, UV, default_weights
from esscher.icl.tasks import LinearTask, Task
from esscher.icl.training.autograd import AutogradPair
from esscher.icl.training.loop import ALIVE, CompiledPair
from esscher.inputs import as_count, as_positive

__all__ = ["OPTIMIZERS", "SCHEDULES", "Training", "TrainingDiverged", "learning_rates", "record_steps", "train"]

Floats = npt.NDArray[np.float64]
OPTIMIZERS = ("sgd", "adam")
SCHEDULES = ("constant", "linear", "cosine")
TOKENS_PER_CALL = 2**26  # between two looks at the clock and at Ctrl-C


@dataclass(frozen=True)
class Training:
    """What training left behind, as tidy tables; models are "softmax" and "linear".

    ``curve``: step, model, loss (mean over the batches since the last record), mse and its stderr on fresh prompts.
    ``distance``: step, squared distance between the parameters of the two models.
    ``path``: step, model, values: [U without its last column, last row of O V] row by row, heads one after the other.
    ``final``: a row per model: mse and stderr, status ("ok" or "diverged"), step, loss, advice; O, V, K, Q flattened.
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
    *,
    steps: Any = 500_000,
    batch: Any = 128,
    rate: Any = 1e-3,
    optimizer: str = "sgd",
    schedule: str = "constant",
    warmup: int = 0,
    heads: Any = 1,
    seed: int = 0,
    prompt_seed: int | None = None,
    records: Any = 200,
    evaluation: Any = 4096,
    final_evaluation: Any = 100_000,
    bound: Any = 1e4,
    raise_on_divergence: bool = True,
    progress: Callable[[int, int], object] | None = None,
) -> Training:
    """Train softmax and (1/L) linear attention on the same prompts of ``length`` tokens from the same weights.

    ``seed`` decides the weights and, unless ``prompt_seed`` is given, the prompts. ``schedule`` "constant", or "linear" or
    "cosine" down to 0, after ``warmup`` steps up. A batch whose loss is not below ``bound`` stops its model; the other goes
    on. ``records`` numbers of training are kept; ``evaluation`` prompts measure the risk at each, ``final_evaluation`` at
    the end. ``progress`` is told (steps done, steps). One head on a ``LinearTask`` needs no tokens (``sgd_kernel``).
    """
    length, steps, batch = as_count(length, "length"), as_count(steps, "steps"), as_count(batch, "batch")
    rates = learning_rates(as_positive(rate, "rate"), steps, schedule, warmup)
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer: expected one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    generator = torch.Generator().manual_seed(seed)
    start = [default_weights(task.dim, generator) for _ in range(as_count(heads, "heads"))]
    options: dict[str, Any] = {
        "batch": batch,
        "adam": optimizer == "adam",
        "bound": as_positive(bound, "bound"),
        "seed": seed if prompt_seed is None else prompt_seed,
    }
    pair: CompiledPair | AutogradPair
    if isinstance(task, LinearTask) and len(start) == 1:
        pair = CompiledPair(task, length, start[0], **options)
    else:
        pair = AutogradPair(task, length, start, **options)
    recorder = _Recorder(pair, as_count(evaluation, "evaluation"))
    for stop in record_steps(steps, as_count(records, "records")):
        while pair.begun < stop:
            chunk = min(stop - pair.begun, max(1, TOKENS_PER_CALL // (batch * length)))
            recorder.losses.append(pair.advance(rates[pair.begun : pair.begun + chunk]))
            if progress is not None:
                progress(pair.begun, steps)
        recorder.record()
        if (pair.diverged != ALIVE).all():
            break
    training = recorder.end(as_count(final_evaluation, "final_evaluation"), float(rates.max()))
    if raise_on_divergence and len(training.diverged):
        raise TrainingDiverged(training)
    return training


def learning_rates(rate: float, steps: int, schedule: str = "constant", warmup: int = 0) -> Floats:
    """The rate of every step."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if not 0 <= warmup < steps:
        raise ValueError(f"warmup: expected a number of steps from 0 to below {steps}, got {warmup}")
    index = np.arange(steps, dtype=np.float64)
    rates = np.full(steps, rate)
    rates[:warmup] *= (index[:warmup] + 1) / (warmup + 1)
    share = (index[warmup:] - warmup) / (steps - warmup)
    if schedule == "linear":
        rates[warmup:] *= 1 - share
    elif schedule == "cosine":
        rates[warmup:] *= 0.5 * (1 + np.cos(np.pi * share))
    return rates


def record_steps(steps: int, records: int) -> list[int]:
    """0, the last step, and about ``records`` between: half evenly spaced, half in geometric progression."""
    even = np.linspace(0, steps, max(2, records // 2 + 1))
    geometric = np.geomspace(1, steps, max(2, records // 2))
    return [int(step) for step in np.unique(np.concatenate([even, geometric]).round())]


class _Recorder:
    """Collects tables while a pair trains."""

    def __init__(self, pair: CompiledPair | AutogradPair, evaluation: int) -> None:
        self.pair, self.evaluation = pair, evaluation
        self.losses: list[Floats] = []
        self.last = np.full(2, np.nan)  # loss of the last batch each model saw
        self.curve: list[dict[str, Any]] = []
        self.distance: list[dict[str, Any]] = []
        self.path: list[dict[str, Any]] = []

    def record(self) -> None:
        pair, step = self.pair, self.pair.begun
        losses = np.concatenate(self.losses, axis=1) if self.losses else np.full((2, 1), np.nan)
        self.losses = []
        mse, stderr = pair.evaluate(self.evaluation)
        for model, kind in enumerate(KINDS):
            seen = losses[model][~np.isnan(losses[model])] if pair.diverged[model] == ALIVE else losses[model]
            known = np.flatnonzero(~np.isnan(losses[model]))
            if known.size:
                self.last[model] = losses[model, known[-1]]
            alive = pair.diverged[model] == ALIVE
            self.curve.append(
                {
                    "step": step,
                    "model": kind,
                    "loss": float(seen.mean()) if seen.size else np.nan,
                    "mse": float(mse[model]) if alive else np.nan,
                    "stderr": float(stderr[model]) if alive else np.nan,
                }
            )
            self.path.append({"step": step, "model": kind, "values": _values(pair.uv(model))})
        both = (pair.diverged == ALIVE).all()
        self.distance.append({"step": step, "distance2": pair.distance() if both else np.nan})

    def end(self, prompts: int, rate: float) -> Training:
        mse, stderr = self.pair.evaluate(prompts)
        rows = []
        for model, kind in enumerate(KINDS):
            at = int(self.pair.diverged[model])
            alive = at == ALIVE
            heads = self.pair.parameters(model)
            rows.append(
                {
                    "model": kind,
                    "mse": float(mse[model]) if alive else np.nan,
                    "stderr": float(stderr[model]) if alive else np.nan,
                    "status": "ok" if alive else "diverged",
                    "step": self.pair.begun if alive else at,
                    "loss": float(self.last[model]),
                    "advice": "" if alive else advice(kind, at, float(self.last[model]), self.pair.bound, rate),
                }
                | {name: _flat([getattr(head, name) for head in heads]) for name in ("O", "V", "K", "Q")}
            )
        curve, distance, path, final = (pd.DataFrame(table) for table in (self.curve, self.distance, self.path, rows))
        return Training(curve, distance, path, final, {kind: self.pair.parameters(i) for i, kind in enumerate(KINDS)})


def advice(kind: str, step: int, loss: float, bound: float, rate: float) -> str:
    """What happened to a model that diverged, and what helps."""
    return (
        f"{kind} attention diverged: loss {loss:.3g} at step {step}, above the bound {bound:g}; "
        f"try a rate below {rate:g} (such as {rate / 4:.2g}), another seed, longer prompts or larger batches"
    )


def _values(uvs: list[UV]) -> list[float]:
    return _flat([torch.cat([uv.U[:, :-1], uv.V[-1][:, None]], dim=1) for uv in uvs])


def _flat(parts: list[torch.Tensor]) -> list[float]:
    return [float(value) for part in parts for value in part.flatten()]
