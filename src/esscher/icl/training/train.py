"""SGD on fresh prompts: softmax and linear attention from the same weights on the same prompts, as
in [S] appendix A.

The loss is the mean squared error E(f - y)^2 of the query's noisy label, so its floor is the
variance of the noise. [S] writes one half of it as the loss of its theory: ``loss="half"`` trains
on that. For SGD it is the same as half the rate: after t steps of rate r the flow of the risk R has
run for a time 2 r t on the square, and r t on its half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch

from esscher.icl.layer import default_weights
from esscher.icl.tasks import LinearTask, Task
from esscher.icl.training.autograd_pair import AutogradPair
from esscher.icl.training.compiled_pair import CompiledPair
from esscher.icl.training.pair import ALIVE, Pair, Step
from esscher.icl.training.record import Recorder, Training, TrainingDiverged
from esscher.icl.training.schedule import learning_rates, record_steps
from esscher.icl.training.spec import PAPER, Loss, Optimizer
from esscher.inputs import as_count, as_positive

__all__ = ["Settings", "Training", "TrainingDiverged", "train"]

TOKENS_PER_CALL = 2**26  # between two looks at the clock and at Ctrl-C


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
        for name, kinds in (("optimizer", get_args(Optimizer)), ("loss", get_args(Loss))):
            if getattr(self, name) not in kinds:
                raise ValueError(
                    f"{name}: expected one of {', '.join(kinds)}, got {getattr(self, name)!r}"
                )

    @property
    def step(self) -> Step:
        seed = self.seed if self.prompt_seed is None else self.prompt_seed
        return Step(
            self.batch,
            self.optimizer == "adam",
            self.bound,
            seed,
            0.5 if self.loss == "half" else 1.0,
        )


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
    diverges stops, the other goes on. ``progress`` is told (steps done, steps). One head on a
    ``LinearTask`` needs no tokens (``prompts``).
    """
    length, settings = as_count(length, "length"), replace(settings or Settings(), **changes)
    rates = learning_rates(settings.rate, settings.steps, settings.schedule, settings.warmup)
    pair = new_pair(task, length, settings)
    recorder = Recorder(pair, settings.evaluation)
    for stop in record_steps(settings.steps, settings.records):
        while pair.begun < stop:
            chunk = min(stop - pair.begun, max(1, TOKENS_PER_CALL // (settings.batch * length)))
            recorder.losses.append(pair.advance(rates[pair.begun : pair.begun + chunk]))
            if progress is not None:
                progress(pair.begun, settings.steps)
        recorder.record()
        if (pair.diverged != ALIVE).all():
            break
    training = recorder.end(settings.final_evaluation, float(rates.max()))
    if raise_on_divergence and len(training.diverged):
        raise TrainingDiverged(training)
    return training


def new_pair(task: Task, length: int, settings: Settings) -> Pair:
    """The pair before its first step."""
    generator = torch.Generator().manual_seed(settings.seed)
    start = [default_weights(task.dim, generator) for _ in range(settings.heads)]
    if isinstance(task, LinearTask) and len(start) == 1:
        return CompiledPair(task, length, start[0], settings.step)
    return AutogradPair(task, length, start, settings.step)
