"""Paired training as one would write it: prompts token by token, gradients by autograd; any task,
any number of heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.icl.layer import KINDS, OVKQ, UV, predict
from esscher.icl.tasks import Prompts, Task
from esscher.icl.training.pair import ALIVE, Step

__all__ = ["AutogradPair"]

Floats = npt.NDArray[np.float64]
EVALUATED = 4096  # tokens times prompts held at once while evaluating, in thousands


class AutogradPair:
    """Softmax and linear attention with one or more heads, whose outputs are added, on the same
    prompts.

    A ``Pair``, as ``CompiledPair`` is, which is faster and covers one head on a ``LinearTask``.
    """

    def __init__(self, task: Task, length: int, start: list[OVKQ], step: Step) -> None:
        self.task, self.length, self.step = task, length, step
        self.heads = [[_leaves(head) for head in start] for _ in range(2)]
        kind: Any = torch.optim.Adam if step.adam else torch.optim.SGD
        self.optimizers = [
            kind([part for head in heads for part in head], lr=1.0) for heads in self.heads
        ]
        self.diverged = np.full(2, ALIVE, np.int64)
        self.begun = 0
        self.generator = torch.Generator().manual_seed(step.seed % 2**63)
        self.fresh = torch.Generator().manual_seed((step.seed + 1) % 2**63)

    def advance(self, rates: Floats) -> Floats:
        losses = np.full((2, rates.size), np.nan)
        for i, rate in enumerate(rates):
            if (self.diverged != ALIVE).all():
                break
            prompts = self.task.sample(self.step.batch, self.length, self.generator)
            for model in np.flatnonzero(self.diverged == ALIVE):
                loss = self._loss(int(model), prompts)
                losses[model, i] = float(loss.detach())
                if not losses[model, i] <= self.step.bound:
                    self.diverged[model] = self.begun + i + 1
                    continue
                optimizer = self.optimizers[model]
                optimizer.param_groups[0]["lr"] = float(rate)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        self.begun += rates.size
        return losses

    def evaluate(self, prompts: int) -> tuple[Floats, Floats]:
        at_once = max(1, EVALUATED * 1000 // (self.length * (self.task.dim + 1)))
        squared = []
        with torch.no_grad():
            for first in range(0, prompts, at_once):
                drawn = self.task.sample(min(at_once, prompts - first), self.length, self.fresh)
                squared.append(
                    torch.stack(
                        [(self._output(model, drawn) - drawn.target) ** 2 for model in range(2)]
                    )
                )
        values = torch.cat(squared, dim=1).numpy()
        return values.mean(axis=1), values.std(axis=1) / np.sqrt(prompts)

    def distance(self) -> float:
        pairs = zip(
            *([part.detach() for head in heads for part in head] for heads in self.heads),
            strict=True,
        )
        return float(sum(((a - b) ** 2).sum() for a, b in pairs))

    def parameters(self, model: int) -> list[OVKQ]:
        return [OVKQ(*(part.detach().clone() for part in head)) for head in self.heads[model]]

    def uv(self, model: int) -> list[UV]:
        return [head.uv() for head in self.parameters(model)]

    def _output(self, model: int, prompts: Prompts) -> Tensor:
        outputs = [predict(OVKQ(*head), prompts, KINDS[model]) for head in self.heads[model]]
        return torch.stack(outputs).sum(dim=0)

    def _loss(self, model: int, prompts: Prompts) -> Tensor:
        return self.step.weight * ((self._output(model, prompts) - prompts.target) ** 2).mean()


def _leaves(head: OVKQ) -> list[Tensor]:
    return [part.clone().requires_grad_() for part in (head.O, head.V, head.K, head.Q)]
