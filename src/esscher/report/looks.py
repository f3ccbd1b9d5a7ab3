"""Which tokens the heads of a probe look at, as its page shows it: texts once, heads by the places
of texts.
"""

from __future__ import annotations

from typing import Any

from esscher.report.packing import number, parts_of, shortened, text_of
from esscher.report.reading import read_table
from esscher.runs import Run

__all__ = ["looks_content"]

DIGITS = 3  # of a weight
LONGEST = 120  # characters of a text, whoever stored it
ASKS, LOOKED_AT = (
    tuple(f"{who}_{what}" for what in ("before", "token", "after")) for who in ("query", "key")
)


def looks_content(run: Run, places: list[tuple[int, int]]) -> dict[str, Any]:
    """Of each head a list of queries: the place of its text, and of each key the place of its text,
    weight and distance.
    """
    frame = read_table(run, "looks")
    if frame is None or frame.empty:
        return {}
    texts: dict[tuple[str, ...], int] = {}
    found: dict[tuple[int, int], list[Any]] = {}
    for (layer, head, _), part in parts_of(
        frame.sort_values(["query", "rank"], kind="stable"), ["layer", "head", "query"]
    ):
        asks, *_ = _placed(part, ASKS, texts)
        keys = zip(_placed(part, LOOKED_AT, texts), part["weight"], part["distance"], strict=True)
        own = [
            asks,
            [[place, number(weight, DIGITS), int(distance)] for place, weight, distance in keys],
        ]
        found.setdefault((int(layer), int(head)), []).append(own)
    return {
        "looks": [found.get(place) for place in places],
        "looks_texts": [list(text) for text in texts],
    }


def _placed(
    part: dict[str, list[Any]], names: tuple[str, ...], texts: dict[tuple[str, ...], int]
) -> list[int]:
    """Where the texts of these columns stand; new ones are added."""
    rows = zip(
        *([shortened(text_of(text), LONGEST) for text in part[name]] for name in names), strict=True
    )
    return [texts.setdefault(row, len(texts)) for row in rows]
