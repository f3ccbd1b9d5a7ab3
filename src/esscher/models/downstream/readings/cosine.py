"""How far an embedding turns."""

from __future__ import annotations

import torch

from esscher.models.downstream.readings.reading import Outcome, Reading

__all__ = ["Cosine"]


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
