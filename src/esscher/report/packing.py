"""Tables as compact JSON that is safe inside a page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = [
    "Grids",
    "columns_of",
    "number",
    "numbers",
    "parts_of",
    "records_of",
    "safe_json",
    "shortened",
    "text_of",
]

DIGITS = 5
LONGEST = 300  # characters of a text from outside, where it stands in a sentence


def number(value: Any, digits: int = DIGITS) -> float | int | None:
    """Five digits; None for what is missing or infinite."""
    value = float(value)
    if not math.isfinite(value):
        return None
    if value.is_integer() and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.{digits}g}")


def numbers(values: Iterable[Any], digits: int = DIGITS) -> list[float | int | None]:
    return [number(value, digits) for value in values]


def text_of(value: Any) -> str:
    """A cell as text; empty where there is none."""
    return "" if value is None or value != value else str(value)


def shortened(text: str, longest: int = LONGEST) -> str:
    """A long text by its two ends, with its length."""
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]} … {text[-longest // 4 :]} ({len(text):,} characters)"


def columns_of(frame: Any) -> dict[str, list[Any]]:
    """A pandas frame as lists by column: numbers rounded, everything else as text."""
    columns: dict[str, list[Any]] = {}
    for name in frame.columns:
        column = frame[name]
        if column.dtype.kind in "iuf":
            columns[str(name)] = numbers(column)
        else:
            columns[str(name)] = [text_of(value) for value in column]
    return columns


def records_of(frame: Any | None) -> list[dict[str, Any]]:
    """The rows of a frame, if there is one."""
    if frame is None:
        return []
    columns = columns_of(frame)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def parts_of(frame: Any, keys: list[str]) -> Iterator[tuple[tuple[Any, ...], dict[str, list[Any]]]]:
    """The rows of each group as lists by column: for thousands of small groups much faster than
    frames.
    """
    rows = frame.groupby(keys, sort=False).indices
    columns = {str(name): frame[name].to_numpy() for name in frame.columns}
    for group, places in rows.items():
        yield group, {name: values[places].tolist() for name, values in columns.items()}


class Grids:
    """Lists that occur many times, such as the token numbers of a curve, kept once and named by
    their place.
    """

    def __init__(self) -> None:
        self.lists: list[list[Any]] = []
        self._places: dict[tuple[Any, ...], int] = {}

    def place(self, values: list[Any]) -> int:
        key = tuple(values)
        if key not in self._places:
            self._places[key] = len(self.lists)
            self.lists.append(values)
        return self._places[key]


def safe_json(value: Any) -> str:
    """JSON in which no character can end a script element or begin markup; ASCII alone, so no line
    separator either.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
