"""Whether a planted fact is found."""

from __future__ import annotations

from esscher.models.downstream.readings.reading import Outcome, Reading

__all__ = ["Found"]


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
