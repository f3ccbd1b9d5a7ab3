"""What commands print: an answer and tables for people, JSON for machines; logs go to stderr.

A command's module says what it takes; what it computes with is imported when it is called, in its
function. So help and completion wait for nothing.
"""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.options import OUTPUT
from esscher.hf.checkpoint import PACKAGED
from esscher.report.style import FORMATS
from esscher.runs.errors import plain, printable

if TYPE_CHECKING:
    from esscher.runs import Column, Run

ROWS = 6  # of a table without --all
LINES, FEWEST, MOST = 12, 3, 8  # lines that a command ends with; rows of their table
GAP = "  "  # between columns
WIDEST, NARROWEST = 40, 24  # a column with cells longer than the first is folded, to the second
ANY = 10_000  # columns where a program reads

MODEL = (
    f"A folder, a GGUF file, a hub name, or {' or '.join(known.name for known in PACKAGED)}, which"
    f" come as packages (default: {PACKAGED[0].name})."
)
Json = Annotated[
    bool,
    typer.Option("--json", help="Print everything as JSON.", rich_help_panel=OUTPUT),
]
Report = Annotated[
    bool,
    typer.Option(
        "--report/--no-report", help="Write report.html into the run.", rich_help_panel=OUTPUT
    ),
]


def as_path(text: str | Path) -> Path:
    """A path as a user names it; an empty name would be the working folder."""
    if not str(text).strip():
        raise typer.BadParameter(
            f"expected the name of a file or folder, got {text!r}; the working folder is ."
        )
    return Path(text)


def path_argument(help: str, shown: str = "RUN") -> Any:
    return typer.Argument(help=help, parser=as_path, metavar=shown)


def path_option(name: str, help: str, panel: str = OUTPUT) -> Any:
    return typer.Option(name, help=help, parser=as_path, metavar="PATH", rich_help_panel=panel)


OUT = "Run directory (default: runs/NAME-HASH)."
Out = Annotated[Path | None, path_option("--out", OUT)]
FIGURES = "svg,png"  # where none are named
Figures = Annotated[
    str,
    typer.Option(
        help="Figure formats: svg, png, pdf, separated by commas; empty for none.",
        rich_help_panel=OUTPUT,
    ),
]


def as_formats(text: str) -> list[str]:
    """Formats of figure files, separated by commas; call it before anything is computed."""
    formats = [kind.strip() for kind in text.split(",") if kind.strip()]
    unknown = [kind for kind in formats if kind not in FORMATS]
    if unknown:
        raise ValueError(
            f"--figures: expected some of {', '.join(FORMATS)}, got {', '.join(unknown)}"
        )
    return formats


def check_device(name: str) -> str:
    """A device on which tensors can be made here."""
    import torch

    try:
        if torch.empty(1, device=name).device.type == "meta":
            raise ValueError(
                f"--device: expected a device that computes, such as cpu or cuda, got {name!r}"
            )
    except (RuntimeError, AssertionError) as cause:  # torch's words for a device that is not there
        raise ValueError(f"--device: {name!r} cannot be used here: {cause}") from cause
    return name


def log(message: str) -> None:
    """A line on stderr."""
    print(printable(message), file=sys.stderr, flush=True)


def log_files(kind: str, files: Iterable[Path | None]) -> None:
    """The files that were written, a line each."""
    for file in files:
        if file is not None:
            log(f"{kind}: {file}")


def say(sentence: str) -> None:
    """A sentence on stdout, folded at the width of the terminal."""
    print("\n".join(fold(sentence)))


def fold(sentence: str) -> list[str]:
    """Lines no wider than the terminal; a number or a path stays whole."""
    text, width = printable(sentence), screen_width()
    if width is None:
        return [text]
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def print_json(value: Any) -> None:
    """JSON in ASCII; infinity and NaN are null."""
    print(json.dumps(plain(value), indent=2, allow_nan=False))


def print_run(run: Run, names: Iterable[str], **more: Any) -> None:
    """A run as JSON: where it is, its settings and those of the named tables that it has."""
    tables = {name: run.table(name).to_dict("records") for name in names if name in run.tables}
    print_json({"run": str(run.path), **more, "spec": run.spec, **tables})


def number(value: float | None, form: str = ".4g") -> str:
    """A number as people read it; - for none. From a thousand on whole, with commas."""
    if value is None or math.isnan(value):
        return "-"
    whole = isinstance(value, int) or abs(value) >= 1000
    return format(value, ",.0f" if whole and form[-1] == "g" and abs(value) < 1e9 else form)


def close(
    sentences: Sequence[str],
    rows: Any,
    keys: Sequence[str],
    columns: Mapping[str, Column],
    following: str = "",
    page: Path | None = None,
) -> None:
    """The end of a command in LINES lines: the answer, a short table, the command to type next, the
    path of the report. ``keys``: columns of the table, without the ends of intervals.
    """
    said = [line for sentence in sentences for line in fold(sentence)]
    print("\n".join(said))
    if rows is not None and len(rows):
        left = LINES - len(said) - 1 - bool(following) - (page is not None)
        shown = rows.head(min(MOST, max(FEWEST, left)))
        ends = [end for key in keys for end in (columns[key].ends or () if key in columns else ())]
        show("", shown[[*keys, *(end for end in ends if end in shown)]], columns, note=False)
    if following:
        print(printable(f"Next: {following}"))  # whole, to be copied
    log_files("report", [page])


# ---- Tables.


def show(
    title: str,
    rows: Any,
    columns: Mapping[str, Column] | None = None,
    most: int | None = None,
    *,
    note: bool = True,
) -> None:
    """Print a table from what is known of its columns: header, kind, interval, place.

    ``rows``: a pandas frame or dictionaries. ``columns``: those of a stored table; a column that is
    not there has its key for a header. Those with a ``first`` come first, and where the terminal is
    narrow as many as there is room for are printed. ``most``: rows that are printed, all if None.
    ``note``: say which columns had no room.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    records = rows.to_dict("records") if hasattr(rows, "to_dict") else list(rows)
    known, width = columns or {}, screen_width()
    if most is not None and most < len(records):
        title = f"{title} ({most} of {len(records)} rows)"
        records = records[:most]
    keys = _keys(records, known)
    headers = [known[key].header if key in known else key.replace("_", " ") for key in keys]
    cells = [[_cell(row, key, known) for row in records] for key in keys]
    table = Table(box=None, pad_edge=False, padding=(0, len(GAP), 0, 0), header_style="")
    kept: list[int] = []
    used = -len(GAP)
    for i, (key, header) in enumerate(zip(keys, headers, strict=True)):
        least, longest = _widths([header, *cells[i]])
        if width is None or not kept or used + len(GAP) + least <= width:
            kept.append(i)
            used += len(GAP) + least
            side: Any = "right" if all(_is_number(row[key]) for row in records) else "left"
            whole = least == longest
            table.add_column(Text(header), justify=side, no_wrap=whole, min_width=len(header))
    for row in zip(*(cells[i] for i in kept), strict=True):
        table.add_row(*map(Text, row))
    console = Console(width=width or ANY, color_system=None)
    with console.capture() as page:
        console.print(table, crop=False)
    if title:
        say(title)
    print("\n".join(line.rstrip() for line in page.get().splitlines()))
    if note and len(kept) < len(keys):
        left = [header for i, header in enumerate(headers) if i not in kept]
        told = ", ".join(left) if len(left) < ROWS else f"{len(left)} more columns"
        say(f"(no room for: {told}; a wider terminal or --json has them)")


def show_tables(run: Run, names: Iterable[str]) -> None:
    """The stored tables of a run, whole."""
    for name in names:
        if name in run.tables:
            show(f"{name.replace('_', ' ')}: {run.path}", run.table(name), run.columns(name))


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


def screen_width() -> int | None:
    """Columns of the terminal, or as COLUMNS says; None where a program reads: any width."""
    told = os.environ.get("COLUMNS", "")
    if told.isdigit() and int(told) > 0:
        return int(told)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else None
    except (OSError, ValueError):  # no file behind it
        return None


def _widths(cells: Sequence[str]) -> tuple[int, int]:
    """The width below which a column cannot go, where only sentences are folded, between words;
    and the one it would like.
    """
    longest = max(map(len, cells))
    word = max(len(word) for cell in cells for word in cell.split() or [""])
    return (min(longest, max(word, NARROWEST)) if longest > WIDEST else longest), longest
