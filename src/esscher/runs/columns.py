"""Descriptions of columns: declared by a job and stored as metadata of the Parquet fields, so that
showing a table needs no code of the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import pyarrow as pa

Kind = Literal["int", "float", "word", "bool", "list"]
Scale = Literal["log", "linear", "words"]


@dataclass(frozen=True)
class Column:
    """A column as tables and pictures show it.

    ``scale``: how a picture shows it by colour or along an axis; None where none does. ``first``:
    columns that have one come first, the smallest first. ``short``: the label where there is little
    room. ``ends``: the columns with the ends of its interval. ``words``: what a column of words may
    hold, in their order; ``meanings``: what each stands for. ``metric``: the error that a measured
    exponent was fitted to. ``of``: the column that a theoretical exponent is a function of, with
    ``status`` (proved, heuristic, experimental, exact) and ``formula``.
    """

    key: str
    kind: Kind
    label: str
    help: str
    scale: Scale | None = None
    first: int | None = None
    short: str = ""
    ends: tuple[str, str] | None = None
    words: tuple[str, ...] = ()
    meanings: tuple[str, ...] = ()
    metric: str = ""
    of: str = ""
    status: str = ""
    formula: str = ""

    @property
    def header(self) -> str:
        return self.short or self.label


Declared = Mapping[str, Sequence[Column]]
"""Columns by table."""


def undeclared(key: str, kind: Kind) -> Column:
    """A column that nobody described: shown under its own name."""
    return Column(key, kind, key.replace("_", " "), f"Column {key} of the stored table.")


def declare(tables: Mapping[str, pa.Table], declared: Declared) -> dict[str, pa.Table]:
    """Tables whose fields carry their descriptions; missing columns are ignored."""
    found = {}
    for name, table in tables.items():
        words = {column.key: _metadata(column) for column in declared.get(name, ())}
        schema = [
            field.with_metadata(words[field.name]) if field.name in words else field
            for field in table.schema
        ]
        found[name] = pa.Table.from_arrays(table.columns, schema=pa.schema(schema))
    return found


def columns_of(schema: pa.Schema) -> dict[str, Column]:
    """The columns of a stored table, in their order."""
    return {field.name: _column(field) for field in schema}


def _metadata(column: Column) -> dict[str, str]:
    known: dict[str, Any] = {f.name: getattr(column, f.name) for f in fields(Column)[2:]}
    known["ends"] = " ".join(column.ends or ())
    known |= {"words": "\n".join(column.words), "meanings": "\n".join(column.meanings)}
    return {name: str(value) for name, value in known.items() if value or value == 0}


def _column(field: pa.Field) -> Column:
    """Metadata of other programs is ignored."""
    known: dict[str, Any] = {
        name.decode("utf-8", "replace"): text.decode("utf-8", "replace")
        for name, text in (field.metadata or {}).items()
    }
    known = {f.name: known[f.name] for f in fields(Column)[2:] if f.name in known}
    ends, first = known.pop("ends", "").split(), known.pop("first", "")
    known |= {name: tuple(known.pop(name, "").splitlines()) for name in ("words", "meanings")}
    if known.get("scale") not in get_args(Scale):
        known.pop("scale", None)
    return replace(
        undeclared(field.name, _kind(field.type)),
        ends=(ends[0], ends[1]) if len(ends) == 2 else None,
        first=int(first) if first.isdecimal() else None,
        **known,
    )


def _kind(kind: pa.DataType) -> Kind:
    types = pa.types
    if types.is_boolean(kind):
        return "bool"
    if types.is_integer(kind):
        return "int"
    if types.is_floating(kind):
        return "float"
    return "list" if types.is_nested(kind) else "word"
