"""Documents out of tables: JSON Lines, JSON, CSV, TSV and Parquet, one per row, the text in one
field.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "TABLES",
    "Piece",
    "as_text",
    "chosen_field",
    "csv_rows",
    "json_values",
    "parquet_rows",
    "show",
]

Piece = tuple[bool, str]  # a stretch of text, and whether a new document starts with it
ROWS = 512
TABLES = frozenset({".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"})


def show(name: str | Path) -> str:
    """A name on one line, whatever characters it holds."""
    text = str(name)
    return text if text.isprintable() else ascii(text)


def as_text(value: Any, place: str) -> str:
    """The string of a field; a missing value is an empty one; anything else is refused."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(
            f"{place}: expected a string, got {type(value).__name__}; name a field that holds text"
        )
    return value


def _lines(blocks: Iterable[str]) -> Iterator[str]:
    """Lines with their ends; a line may be longer than any block."""
    held: list[str] = []
    for block in blocks:
        *whole, rest = block.split("\n")
        for line in whole:
            held.append(line)
            yield "".join(held) + "\n"
            held = []
        held.append(rest)
    if any(held):
        yield "".join(held)


def json_values(blocks: Iterable[str], name: str, field: str | None) -> Iterator[Piece]:
    """One value a line, or one array over all lines: strings, or objects with the field."""
    number, lines = 0, _lines(blocks)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if re.match(r"\s*\[\s*($|[{\"])", line):
            # An array has no end before the last line: it is read whole.
            rest = line + "".join(lines)
            for place, value in enumerate(_parsed(rest, f"{name}, line {number}"), 1):
                yield True, _member(value, field, f"{name}, item {place}")
            return
        place_of_line = f"{name}, line {number}"
        yield True, _member(_parsed(line, place_of_line), field, place_of_line)
    if number == 0:
        raise ValueError(
            f"{name}: expected JSON Lines, got an empty file; give a file with one object a line"
        )


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise ValueError(
            f"{place}: expected JSON, one object a line or one array, got {text.strip()[:40]!r}"
            f" ({str(cause)[:80]}); mend the line"
        ) from cause


def _member(value: Any, field: str | None, place: str) -> str:
    if isinstance(value, str) and field is None:
        return value
    if not isinstance(value, dict):
        raise ValueError(
            f"{place}: expected an object with a field of text, got {type(value).__name__}; mend"
            " the file"
        )
    chosen = chosen_field(field, list(value), place)
    return as_text(value[chosen], f"{place}, field '{chosen}'")


def chosen_field(field: str | None, names: list[str], place: str) -> str:
    """The field asked for, else ``text``; an unknown one is refused with the list of those there
    are.
    """
    wanted = "text" if field is None else field
    if wanted not in names:
        shown = ", ".join(show(name)[:40] for name in names[:12]) or "none"
        raise ValueError(
            f"{place}: expected a field '{wanted}', got the fields {shown}; set field to one of"
            " them"
        )
    return wanted


def csv_rows(
    blocks: Iterable[str], name: str, field: str | None, delimiter: str
) -> Iterator[Piece]:
    """One document a row; the first row names the fields; quoted fields may hold line ends."""
    reader = csv.reader(_lines(blocks), delimiter=delimiter, strict=True)
    header = _row(reader, name)
    if header is None:
        raise ValueError(
            f"{name}: expected a first row with names of fields, got an empty file; give a file"
            " with rows"
        )
    column = header.index(chosen_field(field, header, name))
    while (row := _row(reader, name)) is not None:
        if not row:
            continue
        if len(row) != len(header):
            raise ValueError(
                f"{name}, line {reader.line_num}: expected {len(header)} fields, got {len(row)};"
                " mend the row"
            )
        yield True, row[column]


def _row(reader: Any, name: str) -> list[str] | None:
    """The next row, however long its fields are; the module's own limit is put back each time."""
    limit = csv.field_size_limit(2**31 - 1)
    try:
        return next(reader, None)
    except csv.Error as cause:
        raise ValueError(
            f"{name}, line {reader.line_num}: expected rows of fields, got bad quoting ({cause});"
            " mend it"
        ) from cause
    finally:
        csv.field_size_limit(limit)


def parquet_rows(path: Path, field: str | None) -> Iterator[Piece]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            chosen = chosen_field(field, list(table.schema_arrow.names), show(path))
            row = 0
            for batch in table.iter_batches(ROWS, columns=[chosen]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield True, as_text(value, f"{show(path)}, row {row}, field '{chosen}'")
    except (pa.ArrowException, UnicodeDecodeError) as cause:
        reason = " ".join(str(cause).split())[:120]
        raise ValueError(
            f"{show(path)}: expected a Parquet table of text, got what cannot be read ({reason});"
            " mend it"
        ) from cause
