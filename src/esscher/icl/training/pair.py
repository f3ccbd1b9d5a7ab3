"""What trains a pair of models, softmax and linear attention, from the same weights on the same
prompts: the contract.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from esscher.icl.layer import OVKQ, UV

__all__ = ["ALIVE", "Pair", "Step"]

Floats = npt.NDArray[np.float64]
ALIVE = -1  # step of divergence of a model that has not diverged


@dataclass(frozen=True)
class Step:
    """How a pair makes its steps: prompts in a batch, SGD or Adam, the loss that stops a model, the
    seed of the prompts.

    The loss is ``weight`` times the squared error.
    """

    batch: int
    adam: bool
    bound: float
    seed: int
    weight: float = 1.0


@runtime_checkable
class Pair(Protocol):
    """Softmax (model 0) and linear attention (model 1). A model whose loss leaves the bound is left
    as it was then.
    """

    step: Step
    begun: int  # steps so far
    diverged: npt.NDArray[np.int64]  # step at which each model left the bound, ``ALIVE`` before

    def advance(self, rates: Floats) -> Floats:
        """Train for one step per rate; batch losses (2, steps), NaN for a model that has
        stopped.
        """

    def evaluate(self, prompts: int) -> tuple[Floats, Floats]:
        """Mean squared error of both models on the same fresh prompts, and its standard error."""

    def distance(self) -> float:
        """Squared distance between the parameters of the two models."""

    def parameters(self, model: int) -> list[OVKQ]:
        """The heads of a model."""

    def uv(self, model: int) -> list[UV]:
        """The same as (U, V)."""
