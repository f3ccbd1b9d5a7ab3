"""Tables of runs on the terminal: their headers and intervals are what the run says of its columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from esscher.cli.output import number, print_table

if TYPE_CHECKING:
    from esscher.runs import Column

__all__ = ["Form", "Shown", "count", "fitting", "show_table", "shown"]

GAP = 2  # spaces between columns
Form = str | Callable[[float], str]


@dataclass(frozen=True)
class Shown:
    """A column as it is printed. ``gives_way``: where there is no room, the column that has most goes first; 0 never goes."""

    header: str
    cells: tuple[str, ...]
    words: bool = False
    gives_way: int = 0

    @property
    def width(self) -> int:
        return max(len(cell) for cell in (self.header, *self.cells))


def shown(column: Column, rows: Iterable[Mapping[str, Any]], form: Form = ".4g", *, gives_way: int = 0) -> Shown:
    """A column of a table: words as they are, numbers by their form, with their interval where the column has one."""
    cells = tuple(_cell(column, row, form) for row in rows)
    return Shown(column.header, cells, column.kind == "word", gives_way)


def show_table(title: str, columns: Sequence[Shown], *, width: int | None = None) -> None:
    """Print a table; where a width is given, without the columns that have no room in it. Words stand left while they lead."""
    kept = fitting(columns, width)
    left = next((place for place, column in enumerate(kept) if not column.words), len(kept))
    rows = list(zip(*(column.cells for column in kept), strict=True))
    print_table(title, [column.header for column in kept], rows, left=left)


def fitting(columns: Sequence[Shown], width: int | None) -> list[Shown]:
    """The columns that have room in a width, in their order."""
    kept = list(columns)
    while width is not None and sum(column.width + GAP for column in kept) - GAP > width:
        place = max(range(len(kept)), key=lambda i: (kept[i].gives_way, i))
        if not kept[place].gives_way:
            break
        del kept[place]
    return kept


def count(value: float) -> str:
    """A number of tokens."""
    return number(value, ",.0f" if value >= 100 else ".1f")


def _cell(column: Column, row: Mapping[str, Any], form: Form) -> str:
    value = row[column.key]
    if not isinstance(value, float | int) or isinstance(value, bool):
        return str(value)
    text = _written(value, form)
    if column.ends is None or any(end not in row for end in column.ends):
        return text
    low, high = (_written(row[end], form) for end in column.ends)
    return text if low == high == "-" else f"{text} [{low}, {high}]"


def _written(value: float, form: Form) -> str:
    return number(value, form) if isinstance(form, str) else form(value)
