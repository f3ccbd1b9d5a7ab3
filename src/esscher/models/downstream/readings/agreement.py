"""How often the likeliest token, or label, is the full model's."""

from __future__ import annotations

from esscher.models.downstream.readings.reading import Outcome, Reading

__all__ = ["Agreement"]


class Agreement(Reading):
    """Share of positions whose first choice is the same."""

    name = "agreement"
    label = "agreement"
    help = "Share of positions at which the likeliest token, or the label, is the full model's."
    tasks = ("language", "classifier")
    most = 1.0

    def value(self, full: Outcome, kept: Outcome) -> float:
        return float((full.rows.argmax(-1) == kept.rows.argmax(-1)).double().mean())
