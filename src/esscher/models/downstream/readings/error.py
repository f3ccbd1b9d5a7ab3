"""The error of the model's last word, as a length."""

from __future__ import annotations

from esscher.models.downstream.readings.reading import Outcome, Reading

__all__ = ["Error"]


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
