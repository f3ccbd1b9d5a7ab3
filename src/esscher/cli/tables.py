"""Tables on the terminal: they fit its width, and no number and no path is broken; or Markdown,
where that is asked for.

The headers and intervals of a run's tables are what the run says of its columns.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from esscher.cli.options import Fields, Given
from esscher.cli.output import log, number
from esscher.runs.printable import printable

if TYPE_CHECKING:
    from esscher.runs import Column

__all__ = [
    "LOOK",
    "Form",
    "Look",
    "Shown",
    "count",
    "fitting",
    "print_table",
    "same_form",
    "say",
    "screen_width",
    "show_table",
    "shown",
]

GAP = 2  # spaces between columns
NARROWEST = 24  # characters of a column of sentences
Form = str | Callable[[float], str]
LOOK = Fields("esscher.cli.look:TableLook", ("top", "sort", "markdown"))
Look = Annotated[Given, LOOK]
"""How a table is shown: the flags of a command, handed on to :func:`show_table`."""


@dataclass(frozen=True)
class Shown:
    """A column as it is printed. ``gives_way``: where there is no room, the column that has most
    goes first; 0 never goes.

    ``values`` are what rows are sorted by, ``key`` the name for that, beside the header. A column
    of sentences ``wraps`` between words, and gets no narrower than ``narrowest``.
    """

    header: str
    cells: tuple[str, ...]
    words: bool = False
    gives_way: int = 0
    wraps: bool = False
    narrowest: int = NARROWEST
    key: str = field(default="", compare=False)
    values: tuple[Any, ...] = field(default=(), compare=False)

    @property
    def width(self) -> int:
        return max(len(cell) for cell in (self.header, *self.cells))

    @property
    def least(self) -> int:
        """The width below which it cannot go."""
        return min(self.width, max(self.narrowest, len(self.header))) if self.wraps else self.width

    def rows(self, order: Sequence[int]) -> Shown:
        """Some rows of it, in this order."""
        values = tuple(self.values[row] for row in order) if self.values else ()
        return replace(self, cells=tuple(self.cells[row] for row in order), values=values)


def shown(
    column: Column, rows: Iterable[Mapping[str, Any]], form: Form = ".4g", *, gives_way: int = 0
) -> Shown:
    """A column of a table: words as they are, numbers by their form, with their interval where the
    column has one.
    """
    known = list(rows)
    cells = tuple(_cell(column, row, form) for row in known)
    values = tuple(row[column.key] for row in known)
    return Shown(
        column.header, cells, column.kind == "word", gives_way, key=column.key, values=values
    )


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int = 1,
    look: Mapping[str, Any] | None = None,
) -> None:
    """A table of cells; the first ``left`` columns hold words, the others numbers."""
    cells = list(zip(*rows, strict=True)) or [()] * len(columns)
    show_table(
        title,
        [
            Shown(name, tuple(part), words=i < left, wraps=0 < i < left)
            for i, (name, part) in enumerate(zip(columns, cells, strict=True))
        ],
        look,
    )


def show_table(
    title: str,
    columns: Sequence[Shown],
    look: Mapping[str, Any] | None = None,
    *,
    width: int | None = None,
) -> None:
    """Print a table below its title, without the columns that have no room; these are named. Words
    stand left, numbers right.

    ``look``: "top" (that many rows), "sort" (the column they are ordered by) and "markdown".
    ``width``: of the terminal, or any where the output is read by a program.
    """
    asked = look or {}
    columns = _chosen([_printable(column) for column in columns], asked)
    if asked.get("markdown"):
        print(f"{printable(title)}\n")
        print("\n".join(_markdown(columns)) + "\n")
        return
    width = screen_width() if width is None else width
    kept = fitting(columns, width)
    print("\n".join(_folded(printable(title), width)))
    print("\n".join(_lines(kept, width)))
    if len(kept) < len(columns):
        left_out = ", ".join(column.header for column in columns if column not in kept)
        print(
            "\n".join(
                _folded(
                    f"(no room for: {left_out}; a wider terminal, --markdown or --json has them)",
                    width,
                )
            )
        )


def same_form(look: Mapping[str, Any] | None) -> dict[str, Any]:
    """How a table beside the main one is shown: Markdown where that is, with rows of its own."""
    return {"markdown": True} if look and look.get("markdown") else {}


def say(sentence: str) -> None:
    """A summary in words, above a table."""
    print("\n".join(_folded(printable(sentence), screen_width())))


def screen_width() -> int | None:
    """Columns of the terminal, or as COLUMNS says; None where a program reads, which can take any
    width.
    """
    told = os.environ.get("COLUMNS", "")
    if told.isdigit() and int(told) > 0:
        return int(told)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else None
    except (OSError, ValueError):  # no file behind it
        return None


def fitting(columns: Sequence[Shown], width: int | None) -> list[Shown]:
    """The columns that have room in a width, in their order."""
    kept = list(columns)
    while width is not None and sum(column.least + GAP for column in kept) - GAP > width:
        place = max(range(len(kept)), key=lambda i: (kept[i].gives_way, i))
        if not kept[place].gives_way:
            break
        del kept[place]
    return kept


def count(value: float) -> str:
    """A number of tokens."""
    return number(value, ",.0f" if value >= 100 else ".1f")


def _printable(column: Shown) -> Shown:
    return replace(
        column, header=printable(column.header), cells=tuple(map(printable, column.cells))
    )


def _chosen(columns: list[Shown], asked: Mapping[str, Any]) -> list[Shown]:
    """Rows in the order and the number that was asked for."""
    rows = list(range(max((len(column.cells) for column in columns), default=0)))
    if asked.get("sort"):
        name, _, way = str(asked["sort"]).partition(":")
        column = next((column for column in columns if name in (column.key, column.header)), None)
        if column is None or way not in ("", "up", "down"):
            names = ", ".join(column.key or column.header for column in columns)
            raise ValueError(
                f"--sort: expected one of {names}, with :down for the largest first, got"
                f" {asked['sort']!r}"
            )
        rows.sort(key=lambda row: _rank(column, row), reverse=way == "down")
        # what has no number stands last, either way
        rows.sort(key=lambda row: _rank(column, row)[0] == 2)
    top = asked.get("top")
    if top is not None and top < len(rows):
        log(f"the first {top} of {len(rows)} rows")
        rows = rows[:top]
    return [column.rows(rows) for column in columns]


def _rank(column: Shown, row: int) -> tuple[int, float, str]:
    """Numbers by size, then words; what is neither last."""
    value = column.values[row] if column.values else column.cells[row]
    if isinstance(value, int | float):
        return (2, 0.0, "") if value != value else (0, float(value), "")
    text = str(value)
    if re.fullmatch(r"-?[\d,]*\.?\d+(e[+-]?\d+)?%?", text):
        return (0, float(text.replace(",", "").rstrip("%")), "")
    return (2, 0.0, "") if text in ("-", "") else (1, 0.0, text)


def _lines(columns: Sequence[Shown], width: int | None) -> list[str]:
    """Header and rows; sentences get what room is left, and are continued below."""
    spare = None if width is None else width - sum(column.least + GAP for column in columns) + GAP
    widths = []
    for column in columns:
        own = (
            column.width
            if spare is None or not column.wraps
            else min(column.width, column.least + max(spare, 0))
        )
        spare = None if spare is None else spare - (own - column.least)
        widths.append(own)
    lines = [_line([column.header for column in columns], columns, widths)]
    for cells in zip(*(column.cells for column in columns), strict=True):
        row = zip(cells, columns, widths, strict=True)
        parts = [_folded(cell, own) if column.wraps else [cell] for cell, column, own in row]
        for i in range(max(map(len, parts))):
            lines.append(
                _line([part[i] if i < len(part) else "" for part in parts], columns, widths)
            )
    return lines


def _line(cells: Sequence[str], columns: Sequence[Shown], widths: Sequence[int]) -> str:
    row = zip(cells, columns, widths, strict=True)
    placed = [
        cell.ljust(width) if column.words else cell.rjust(width) for cell, column, width in row
    ]
    return (" " * GAP).join(placed).rstrip()


def _folded(text: str, width: int | None) -> list[str]:
    """Lines of a sentence; a number or a path stays whole, however long."""
    return (
        [text]
        if width is None
        else textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
    )


def _markdown(columns: Sequence[Shown]) -> list[str]:
    rows = [
        [column.header for column in columns],
        [":--" if column.words else "--:" for column in columns],
    ]
    rows += [list(cells) for cells in zip(*(column.cells for column in columns), strict=True)]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


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
