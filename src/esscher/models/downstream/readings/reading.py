"""The contract of a reading."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from esscher.models.huggingface.task import Task

__all__ = ["Outcome", "Reading"]


@dataclass(frozen=True)
class Outcome:
    """What a model said of one text. ``rows``: logits (m, words) of a language model, (1, labels)
    of a classifier, or the embedding (1, d) of an encoder; ``targets``: the tokens that truly came
    next, where that is asked; ``known``: what else was found of the text, by the name of the
    reading.
    """

    task: Task
    rows: Tensor
    targets: Tensor | None = None
    known: dict[str, float] = field(default_factory=dict)


class Reading(ABC):
    """A number of a text: how the model that keeps a few keys differs from the full one."""

    name: ClassVar[str]
    label: ClassVar[str]
    help: ClassVar[str]
    tasks: ClassVar[tuple[Task, ...]]
    least: ClassVar[float] = 0.0  # range of its values: intervals stay in it
    most: ClassVar[float] = math.inf
    binary: ClassVar[bool] = False  # 0 or 1 of a text
    paired: ClassVar[bool] = False  # in nats: rules are compared by differences on the same texts

    @abstractmethod
    def value(self, full: Outcome, kept: Outcome) -> float | None:
        """None where this text does not have it."""
