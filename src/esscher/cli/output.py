"""What commands print: an answer and tables for people, JSON for machines; logs go to stderr.

A command's module says what it takes; what it computes with is imported when it is called, in its
function. So help and completion wait for nothing.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.options import OUTPUT
from esscher.hf.package import PACKAGED
from esscher.report.style import FORMATS
from esscher.runs.errors import plain, printable

if TYPE_CHECKING:
    from esscher.runs import Column, Run

UNPRINTABLE = re.compile("[^\n -~]+")  # at most; letters of other scripts are told apart one by one
ROWS = 6  # of the table at the end of a command, unless --all or --top asks for more
GAP = "  "  # between columns
WIDEST, NARROWEST = 40, 24  # a column with cells longer than the first is folded, to the second
ANY = 10_000  # columns where a program reads

MODEL = (
    f"A folder, a GGUF file, a hub name, or {' or '.join(known.name for known in PACKAGED)} (models"
    f" that come as packages); {PACKAGED[0].name} when left out."
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
    name = str(text)
    if not name.strip() or "\0" in name:
        raise typer.BadParameter(
            f"expected the name of a file or folder, got {name!r}; the working folder is ."
        )
    return Path(name)


def path_argument(help: str, shown: str = "RUN") -> Any:
    return typer.Argument(help=help, parser=as_path, metavar=shown)


def path_option(name: str, help: str) -> Any:
    return typer.Option(name, help=help, parser=as_path, metavar="PATH", rich_help_panel=OUTPUT)


Out = Annotated[Path | None, path_option("--out", "Run directory; runs/NAME-HASH when left out.")]
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


def say(sentence: str) -> None:
    """A sentence on stdout, folded at the width of the terminal; a number or a path stays whole."""
    text, width = printable(sentence), screen_width()
    whole = {"break_long_words": False, "break_on_hyphens": False}
    print(text if width is None else textwrap.fill(text, width, **whole))  # type: ignore[arg-type]


def print_json(value: Any) -> None:
    """JSON in which every character is printable or escaped; ASCII where the stream needs it."""
    ascii_only = not (sys.stdout.encoding or "ascii").lower().startswith("utf")
    text = json.dumps(plain(value), indent=2, allow_nan=False, ensure_ascii=ascii_only)
    print(
        UNPRINTABLE.sub(
            lambda found: "".join(
                c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in found.group()
            ),
            text,
        )
    )


def number(value: float | None, form: str = ".4g") -> str:
    """A number as people read it; - for none. From a thousand on whole, with commas."""
    if value is None or math.isnan(value):
        return "-"
    whole = isinstance(value, int) or abs(value) >= 1000
    return format(value, ",.0f" if whole and form[-1] == "g" and abs(value) < 1e9 else form)


# ---- Tables.


def show(
    title: str,
    rows: Any,
    columns: Mapping[str, Column] | None = None,
    look: Mapping[str, Any] | None = None,
) -> None:
    """Print a table from what is known of its columns: header, kind, interval, place.

    ``rows``: a pandas frame or dictionaries. ``columns``: those of a stored table; a column that is
    not there has its key for a header. Those with a ``first`` come first, and where the terminal is
    narrow as many as there is room for are printed. ``look``: flags top, sort, markdown.
    """
    records = rows.to_dict("records") if hasattr(rows, "to_dict") else list(rows)
    known, asked = columns or {}, look or {}
    keys = _keys(records, known)
    records, total = _chosen(records, keys, known, asked), len(records)
    if len(records) < total:
        title = f"{title} ({len(records)} of {total} rows)"
    headers = [known[key].header if key in known else key.replace("_", " ") for key in keys]
    cells = [[_cell(row, key, known) for row in records] for key in keys]
    words = [not all(_is_number(row[key]) for row in records) for key in keys]
    if asked.get("markdown"):
        lines = [headers, [":--" if word else "--:" for word in words], *zip(*cells, strict=True)]
        print(f"{printable(title)}\n")
        for line in lines:
            print("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |")
        print()
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = screen_width()
    kept = _fitting(headers, cells, width)
    table = Table(box=None, pad_edge=False, padding=(0, len(GAP), 0, 0), header_style="")
    for i in kept:
        whole = _least(headers[i], cells[i]) == max(map(len, [headers[i], *cells[i]]))
        side: Any = "left" if words[i] else "right"
        table.add_column(Text(headers[i]), justify=side, no_wrap=whole, min_width=len(headers[i]))
    for row in zip(*(cells[i] for i in kept), strict=True):
        table.add_row(*map(Text, row))
    console = Console(width=width or ANY, color_system=None)
    with console.capture() as page:
        console.print(table, crop=False)
    say(title)
    print("\n".join(line.rstrip() for line in page.get().splitlines()))
    if len(kept) < len(keys):
        left = [header for i, header in enumerate(headers) if i not in kept]
        told = ", ".join(left) if len(left) < ROWS else f"{len(left)} more columns"
        say(f"(no room for: {told}; a wider terminal, --markdown or --json has them)")


def show_tables(run: Run, names: Iterable[str], look: Mapping[str, Any]) -> None:
    """The stored tables of a run, whole; the flags top and sort are for the first."""
    for i, name in enumerate(name for name in names if name in run.tables):
        own = look if i == 0 else {"markdown": look.get("markdown")}
        show(f"{name.replace('_', ' ')}: {run.path}", run.table(name), run.columns(name), own)


def brief(look: Mapping[str, Any]) -> dict[str, Any]:
    """The look of the one table at the end of a command: ROWS rows unless --top says more."""
    return {"most": ROWS, **look}


def _keys(records: Sequence[Mapping[str, Any]], known: Mapping[str, Column]) -> list[str]:
    """Columns in the order of their place; ends of intervals stand beside their number, and cells
    with arrays stay in the run.
    """
    found = [key for key in (records[0] if records else known) if not key.startswith("_")]
    ends = {end for column in known.values() if column.key in found for end in column.ends or ()}
    lists = {key for key, column in known.items() if column.kind == "list"}
    places = {key: column.first for key, column in known.items() if column.first is not None}
    shown = (key for key in found if key not in ends | lists)
    return sorted(shown, key=lambda key: places.get(key, len(found)))


def _chosen(
    records: list[Mapping[str, Any]],
    keys: Sequence[str],
    known: Mapping[str, Column],
    asked: Mapping[str, Any],
) -> list[Mapping[str, Any]]:
    """Rows in the order and the number that was asked for; without a number last, either way."""
    if asked.get("sort"):
        name, _, way = str(asked["sort"]).partition(":")
        names = {(known[key].header if key in known else key): key for key in keys}
        key = name if name in keys else names.get(name)
        if key is None or way not in ("", "up", "down"):
            raise ValueError(
                f"--sort: expected one of {', '.join(keys)}, with :down for the largest first, got"
                f" {asked['sort']!r}"
            )
        there = [row for row in records if row[key] is not None and row[key] == row[key]]
        rest = [row for row in records if row not in there]
        records = sorted(there, key=lambda row: row[key], reverse=way == "down") + rest
    return records[: asked.get("top") or asked.get("most")]


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


def _least(header: str, cells: Sequence[str]) -> int:
    """The width below which a column cannot go: sentences are folded between words, others not."""
    longest = max(map(len, [header, *cells]))
    word = max(len(word) for cell in [header, *cells] for word in cell.split() or [""])
    return min(longest, max(word, NARROWEST)) if longest > WIDEST else longest


def _fitting(
    headers: Sequence[str], cells: Sequence[Sequence[str]], width: int | None
) -> list[int]:
    """The columns that have room, in their order; the first always."""
    kept: list[int] = []
    used = -len(GAP)
    for i, (header, column) in enumerate(zip(headers, cells, strict=True)):
        needs = len(GAP) + _least(header, column)
        if width is None or not kept or used + needs <= width:
            kept.append(i)
            used += needs
    return kept
