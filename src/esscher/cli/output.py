"""What commands print: an answer and tables for people, JSON for machines; logs go to stderr.

A command's module says what it takes; what it computes with is imported when it is called, in its
function. So help and completion wait for nothing.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esscher.runs.errors import plain, printable

if TYPE_CHECKING:
    from esscher.report.words import Answer
    from esscher.runs import Column, Run

LINES, FEWEST, MOST = 12, 2, 8  # lines that a command ends with; rows of their table
WIDEST, NARROWEST = 40, 16  # a column with cells longer than the first is folded, to the second
ANY = 10_000  # columns where a program reads
TABLES = {  # of a run, for --json and --all
    "probe": ("heads", "budget", "layers", "about"),
    "compress": (
        *("compress", "check", "kinds", "layers", "depth", "sensitivity", "together", "about"),
    ),
    "converge": ("rates",),
    "icl-train": ("final",),
    "icl-flow": ("final",),
    "icl-concentration": ("rates",),
    "icl-stability": ("verdict",),
    "evidence": ("evidence",),
}


def log(message: str) -> None:
    """A line on stderr."""
    print(printable(message), file=sys.stderr, flush=True)


def _fold(sentence: str) -> list[str]:
    """Lines no wider than the terminal; a number or a path stays whole."""
    settings: Any = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(printable(sentence), _screen_width(), **settings) or [""]


def print_json(value: Any) -> None:
    """JSON in ASCII; infinity and NaN are null. Tables are lists of rows."""
    if isinstance(value, dict):
        value = {name: _records(x) if hasattr(x, "to_dict") else x for name, x in value.items()}
    print(json.dumps(plain(value), indent=2, allow_nan=False))


def number(value: float | None, form: str = ".4g") -> str:
    """A number as people read it; - for none. From a thousand on whole, with commas."""
    if value is None or math.isnan(value):
        return "-"
    whole = isinstance(value, int) or abs(value) >= 1000
    return format(value, ",.0f" if whole and form[-1] == "g" and abs(value) < 1e9 else form)


# ---- How a command ends.


def end_run(
    run: Run,
    as_json: bool,
    *,
    answer: Answer | None = None,
    everything: bool = False,
    report: bool = True,
) -> None:
    """End a command that made a run: write its page, then print its tables as JSON, or its answer.

    ``answer``: what is said in place of what the report says of the run; its rows are printed too.
    """
    from esscher.report import write_report
    from esscher.report.words import answer_of

    page = write_report([run]) if report else None
    names = TABLES.get(run.manifest.job, ())
    tables = {name: run.table(name) for name in names if name in run.tables}
    if answer is not None:
        tables[answer.table] = answer.rows
    if as_json:
        where = {"run": str(run.path), "report": None if page is None else str(page)}
        rows = {"rows": tables.pop("compress")} if "compress" in tables else {}
        return print_json({**where, "spec": run.spec, **rows, **tables})
    if everything:
        for name, table in tables.items():
            show(f"{name.replace('_', ' ')}: {run.path}", table, run.columns(name))
    found = answer_of(run) if answer is None else answer
    columns = run.columns(found.table) if found.table else None
    close(*found[:4], columns, page, everything=everything)


def close(
    sentences: Iterable[str],
    rows: Any = (),
    keys: Sequence[str] = (),
    following: str = "",
    columns: Mapping[str, Column] | None = None,
    page: Path | None = None,
    *,
    everything: bool,
) -> None:
    """The end of a command in LINES lines: the answer, a short table of these ``keys`` and how many
    rows it leaves out, the command to type next, the path of the report. ``everything``: no short
    table, the full ones stand above.
    """
    said = [line for sentence in sentences for line in _fold(sentence)]
    if said:
        print("\n".join(said))
    if not everything and len(rows):
        left = LINES - len(said) - 1 - bool(following) - (page is not None)
        known = columns or {}
        if len(rows) > min(MOST, left):
            left -= 1  # for the line below the table
        shown = _records(rows[: min(MOST, max(FEWEST, left))])
        names = [key for key in dict.fromkeys(keys) if key in shown[0]]
        show("", _fitting(shown, names, known), known)
        if more := len(rows) - len(shown):
            print(f"{more:,} more row{'s' * (more > 1)}: --all")
    if following:
        print(printable(f"Next: {following}"))  # whole, to be copied
    if page is not None:
        log(f"report: {page}")


# ---- Tables.


def _fitting(
    rows: Sequence[Mapping[str, Any]], keys: Sequence[str], known: Mapping[str, Column]
) -> list[dict[str, Any]]:
    """Rows with those of the keys that fit the screen: later intervals go first, then the last
    columns.
    """
    ends = {key: known[key].ends or () for key in keys if key in known and known[key].ends}
    while True:
        names = dict.fromkeys([*keys, *(end for key in ends for end in ends[key])])
        found = [{name: row[name] for name in names if name in row} for row in rows]
        if _width(found, known) <= _screen_width() or len(keys) <= FEWEST:
            return found
        if len(ends) > 1:
            ends.popitem()
        else:
            keys = keys[:-1]
            ends = {key: own for key, own in ends.items() if key in keys}


def _width(rows: Sequence[Mapping[str, Any]], known: Mapping[str, Column]) -> int:
    """Characters of a table, its long cells folded."""
    widths = (
        max(len(_header(key, known)), *(len(_cell(row, key, known)) for row in rows))
        for key in _keys(rows, known)
    )
    return sum(min(width, WIDEST) + 2 for width in widths) - 2


def show(title: str, rows: Any, columns: Mapping[str, Column] | None = None) -> None:
    """Print a table from what is known of its columns: header, interval, place.

    ``rows``: a pandas frame or dictionaries. ``columns``: those of a stored table; a column that is
    not there has its key for a header. Those with a ``first`` come first. Sentences are folded
    where the terminal is narrow; numbers and names stay whole.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    records, known = _records(rows), columns or {}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    cells, width = [], 0
    for key in _keys(records, known):
        cells.append([_cell(row, key, known) for row in records])
        header = _header(key, known)
        texts = [header, *cells[-1]]
        longest = max(map(len, texts))
        word = max((len(word) for text in texts for word in text.split()), default=0)
        whole = longest <= WIDEST or word == longest
        least = longest if whole else max(NARROWEST, word)
        side: Any = "right" if all(_is_number(row[key]) for row in records) else "left"
        table.add_column(Text(header), justify=side, no_wrap=whole, min_width=least)
        width += least + 2
    for row in zip(*cells, strict=True):
        table.add_row(*map(Text, row))
    console = Console(width=max(_screen_width(), width), color_system=None)
    with console.capture() as page:
        console.print(table, crop=False)
    if title:
        print("\n".join(_fold(title)))
    print("\n".join(line.rstrip() for line in page.get().splitlines()))


def _header(key: str, known: Mapping[str, Column]) -> str:
    return known[key].header if key in known else key.replace("_", " ")


def _records(rows: Any) -> list[dict[str, Any]]:
    return rows.to_dict("records") if hasattr(rows, "to_dict") else list(rows)


def _keys(records: Sequence[Mapping[str, Any]], known: Mapping[str, Column]) -> list[str]:
    """Columns in the order of their place; ends of intervals stand beside their number, and cells
    with arrays stay in the run.
    """
    found = list(records[0] if records else known)
    hidden = {end for key in found if key in known for end in known[key].ends or ()}
    hidden |= {key for key, column in known.items() if column.kind == "list"}
    places = {key: column.first for key, column in known.items() if column.first is not None}
    shown = (key for key in found if key not in hidden)
    return sorted(shown, key=lambda key: places.get(key, len(found)))


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


def _cell(row: Mapping[str, Any], key: str, known: Mapping[str, Column]) -> str:
    value = row[key]
    if not _is_number(value):
        return "-" if value is None else printable(str(value))
    ends = known[key].ends if key in known else None
    if ends is None or any(end not in row for end in ends) or value != value:
        return number(value, ".3g")
    text, low, high = (number(row[name], ".3g") for name in (key, *ends))
    return text if low == high == "-" else f"{text} [{low}, {high}]"


def _screen_width() -> int:
    """Columns of the terminal, or as COLUMNS says; ANY where a program reads."""
    return shutil.get_terminal_size((ANY, 24)).columns
