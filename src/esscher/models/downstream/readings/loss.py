"""Cross entropy of the tokens that truly come next."""

from __future__ import annotations

import torch

from esscher.models.downstream.readings.reading import Outcome, Reading

__all__ = ["Loss"]


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
