"""Exponents that theory gives beside measured ones: which lines a picture draws, from what a run
says of its columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from esscher.runs.columns import Column

__all__ = ["DASHES", "TheoryLine", "theory_lines"]

DASHES = {"proved": "dashdot", "heuristic": "dashed", "experimental": "dotted", "exact": "solid"}
COLORS = (1, 2, 3, 4, 6, 5)


@dataclass(frozen=True)
class TheoryLine:
    """A column of exponents as a line: over the column ``of`` it is a function, over others a mark
    at each head.
    """

    key: str
    label: str
    of: str
    dash: str
    color: int


def theory_lines(columns: Mapping[str, Column]) -> list[TheoryLine]:
    """The lines of a table, in the order of its columns."""
    found = [column for column in columns.values() if column.of]
    return [
        TheoryLine(
            column.key, _label(column), column.of, _dash(column.status), COLORS[i % len(COLORS)]
        )
        for i, column in enumerate(found)
    ]


def _label(column: Column) -> str:
    return f"{column.formula} ({column.status})" if column.formula else column.status


def _dash(status: str) -> str:
    return next((dash for word, dash in DASHES.items() if status.startswith(word)), "dotted")
