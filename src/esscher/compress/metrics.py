"""The contract of a reading."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from esscher.hf.loading import Task


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


# ---- How often the likeliest token, or label, is the full model's.


class Agreement(Reading):
    """Share of positions whose first choice is the same."""

    name = "agreement"
    label = "agreement"
    help = "Share of positions at which the likeliest token, or the label, is the full model's."
    tasks = ("language", "classifier")
    most = 1.0

    def value(self, full: Outcome, kept: Outcome) -> float:
        return float((full.rows.argmax(-1) == kept.rows.argmax(-1)).double().mean())


# ---- How far an embedding turns.


class Cosine(Reading):
    """<e, e_kept> / (|e| |e_kept|) of mean hidden states."""

    name = "cosine"
    label = "cosine"
    help = "Cosine of the embedding, the mean of the last hidden states, with the full model's."
    tasks = ("encoder",)
    least, most = -1.0, 1.0

    def value(self, full: Outcome, kept: Outcome) -> float:
        return float(
            torch.nn.functional.cosine_similarity(full.rows.double(), kept.rows.double()).mean()
        )


# ---- Kullback-Leibler divergence of what the model says from what the full model says.


class Divergence(Reading):
    """sum_w p(w) log(p(w) / p_kept(w)), mean over the positions; p of the full model."""

    name = "kl"
    label = "divergence"
    help = (
        "Kullback-Leibler divergence of the next token, or of the label, from the full model's, in"
        " nats; mean over positions."
    )
    tasks = ("language", "classifier")
    paired = True

    def value(self, full: Outcome, kept: Outcome) -> float:
        p, q = (torch.log_softmax(rows.double(), -1) for rows in (full.rows, kept.rows))
        return float((p.exp() * (p - q)).sum(-1).mean())


# ---- The error of the model's last word, as a length.


class Error(Reading):
    """|z_kept - z| / |z| of logits (without their mean, which the softmax does not see) or of the
    embedding.
    """

    name = "error"
    label = "relative error of the output"
    help = (
        "Length of the change of logits, or of the embedding, relative to theirs; root mean square"
        " over positions."
    )
    tasks = ("language", "classifier", "encoder")

    def value(self, full: Outcome, kept: Outcome) -> float:
        before, after = full.rows.double(), kept.rows.double()
        if full.task != "encoder":
            before, after = (rows - rows.mean(-1, keepdim=True) for rows in (before, after))
        size = float(before.square().sum())
        return float((after - before).square().sum() / size) ** 0.5 if size else 0.0


# ---- Cross entropy of the tokens that truly come next.


class Loss(Reading):
    """-log p(next token), mean over positions; what keeping few keys adds is its difference to the
    full model's.
    """

    name = "loss"
    label = "loss"
    help = (
        "Cross entropy of the true next token, in nats, mean over positions; the full model's is"
        " the row full."
    )
    tasks = ("language",)
    paired = True

    def value(self, full: Outcome, kept: Outcome) -> float | None:
        if kept.targets is None:
            return None
        return float(
            torch.nn.functional.cross_entropy(kept.rows[: len(kept.targets)].double(), kept.targets)
        )


# ---- Whether a planted fact is found.


class Found(Reading):
    """1 where every token of the answer is the likeliest at its place; else 0."""

    name = "needle"
    label = "needles found"
    help = "Share of planted facts whose every token is the likeliest, the tokens before it given."
    tasks = ("language",)
    most = 1.0
    binary = True

    def value(self, full: Outcome, kept: Outcome) -> float | None:
        return kept.known.get(self.name)


# ---- Whether a text still finds the text it found before: retrieval among the texts of the run.


class Neighbour(Reading):
    """1 where the nearest other text, by the cosine of embeddings, is the full model's; else 0."""

    name = "neighbour"
    label = "retrieval agreement"
    help = (
        "Share of texts whose nearest other text, by the cosine with its full embedding, is the one"
        " found on all keys."
    )
    tasks = ("encoder",)
    most = 1.0
    binary = True

    def value(self, full: Outcome, kept: Outcome) -> float | None:
        return kept.known.get(self.name)


# ---- The error of attention that one query in twenty exceeds, inputs held fixed: an average
# hides them.


class WorstQuery(Reading):
    """95 % quantile over queries and heads of |W_O (output - limit)| / root mean square |W_O limit|
    of the head.
    """

    name = "q95"
    label = "error of attention, 95 %"
    help = (
        "Relative error of a head's output at the full model's inputs that 95 % of queries and"
        " heads stay below."
    )
    tasks = ("language",)

    def value(self, full: Outcome, kept: Outcome) -> float | None:
        return kept.known.get(self.name)


# ---- What is read off a model's last word, one file each; a reading compares the full model with
# one that keeps a few keys.

READINGS: tuple[Reading, ...] = (
    Divergence(),
    Agreement(),
    Loss(),
    Cosine(),
    Neighbour(),
    Found(),
    WorstQuery(),
    Error(),
)
