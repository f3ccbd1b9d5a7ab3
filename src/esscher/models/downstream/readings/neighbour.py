"""Whether a text still finds the text it found before: retrieval among the texts of the run."""

from __future__ import annotations

from esscher.models.downstream.readings.reading import Outcome, Reading

__all__ = ["Neighbour"]


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
