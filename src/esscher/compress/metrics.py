"""Output metrics: how the answers of a model with fewer keys differ from the full model's."""

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
    of a classifier, or the embedding (1, d) of an encoder; ``targets``: the true next tokens;
    ``known``: numbers of the text that come from elsewhere, by metric.
    """

    task: Task
    rows: Tensor
    targets: Tensor | None = None
    known: dict[str, float] = field(default_factory=dict)


class Metric(ABC):
    """A number of one text. A new metric is one subclass with ``value``; defining it is enough."""

    name: ClassVar[str]
    help: ClassVar[str]
    tasks: ClassVar[tuple[Task, ...]]
    least: ClassVar[float] = 0.0  # range of its values: intervals stay in it
    most: ClassVar[float] = math.inf
    binary: ClassVar[bool] = False  # 0 or 1 of a text
    paired: ClassVar[bool] = False  # in nats: rules are also compared on the same texts

    @abstractmethod
    def value(self, full: Outcome, kept: Outcome) -> float | None:
        """None where this text does not have it."""


class Divergence(Metric):
    """sum_w p(w) log(p(w) / p_kept(w)), p of the full model."""

    name = "kl"
    help = "KL divergence of the next token, or label, from the full model's; nats per token."
    tasks = ("language", "classifier")
    paired = True

    def value(self, full: Outcome, kept: Outcome) -> float:
        p, q = (torch.log_softmax(rows.double(), -1) for rows in (full.rows, kept.rows))
        return float((p.exp() * (p - q)).sum(-1).mean())


class Agreement(Metric):
    name = "agreement"
    help = "Share of positions at which the likeliest token, or label, is the full model's."
    tasks = ("language", "classifier")
    most = 1.0

    def value(self, full: Outcome, kept: Outcome) -> float:
        return float((full.rows.argmax(-1) == kept.rows.argmax(-1)).double().mean())


class Loss(Metric):
    name = "loss"
    help = "Cross entropy of the true next token, nats per token."
    tasks = ("language",)
    paired = True

    def value(self, full: Outcome, kept: Outcome) -> float | None:
        if kept.targets is None:
            return None
        rows = kept.rows[: len(kept.targets)].double()
        return float(torch.nn.functional.cross_entropy(rows, kept.targets))


class Cosine(Metric):
    name = "cosine"
    help = "Cosine of the embedding, the mean of the last hidden states, with the full model's."
    tasks = ("encoder",)
    least, most = -1.0, 1.0

    def value(self, full: Outcome, kept: Outcome) -> float:
        rows = full.rows.double(), kept.rows.double()
        return float(torch.nn.functional.cosine_similarity(*rows).mean())


class Error(Metric):
    """|z_kept - z| / |z|; logits without their mean, which the softmax does not see."""

    name = "error"
    help = "Relative change of the logits, or of the embedding; root mean square over positions."
    tasks = ("language", "classifier", "encoder")

    def value(self, full: Outcome, kept: Outcome) -> float:
        before, after = full.rows.double(), kept.rows.double()
        if full.task != "encoder":
            before, after = (rows - rows.mean(-1, keepdim=True) for rows in (before, after))
        size = float(before.square().sum())
        return float((after - before).square().sum() / size) ** 0.5 if size else 0.0


def _known(self: Metric, full: Outcome, kept: Outcome) -> float | None:
    """A number that is found with the text, not from the outputs."""
    return kept.known.get(self.name)


class Needle(Metric):
    name = "needle"
    help = "Share of planted facts found: each of their tokens is the model's likeliest."
    tasks = ("language",)
    most = 1.0
    binary = True
    value = _known


class SeveralNeedles(Metric):
    name = "needle_several"
    help = "Share of planted facts found, with four in a prompt and all asked for."
    tasks = ("language",)
    most = 1.0
    value = _known


class NeedleWithDistractor(Metric):
    name = "needle_distractor"
    help = "Share of planted facts found, with a similar fact in the prompt."
    tasks = ("language",)
    most = 1.0
    binary = True
    value = _known


class Predicted(Metric):
    name = "kl_predicted"
    help = "KL predicted from exact errors of heads and their Fisher metric; nats per token."
    tasks = ("language",)
    value = _known


class PredictedCross(Metric):
    name = "kl_cross"
    help = "Predicted KL with cross terms between heads, from gradients at decoded tokens."
    tasks = ("language",)
    value = _known


class WorstQuery(Metric):
    name = "q95"
    help = "Relative error of a head's output that 95 % of queries and heads stay below."
    tasks = ("language",)
    value = _known


OWN: tuple[type[Metric], ...] = (
    *(Divergence, Predicted, PredictedCross, Loss, Agreement),
    *(Needle, SeveralNeedles, NeedleWithDistractor, Cosine, Error, WorstQuery),
)
NEEDLES = {
    "single": Needle.name,
    "several": SeveralNeedles.name,
    "distractor": NeedleWithDistractor.name,
}


def metrics() -> dict[str, Metric]:
    """Every metric by name, those defined elsewhere too."""
    return {one.name: one() for one in (*OWN, *Metric.__subclasses__())}
