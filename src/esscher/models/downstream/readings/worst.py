"""The error of attention that one query in twenty exceeds, inputs held fixed: an average hides
them.
"""

from __future__ import annotations

from esscher.models.downstream.readings.reading import Outcome, Reading

__all__ = ["WorstQuery"]


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
