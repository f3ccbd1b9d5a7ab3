"""Column: the name, label and help of a column of a table.

A job declares its columns beside the code that computes them: the statistics of a probe in
``probe/statistics``, ``compress/tables.py``, ``errors/montecarlo/job.py``, ``icl/jobs.py``. They
are stored as metadata of the Parquet fields, so that showing a table needs no code of the job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import pyarrow as pa

Kind = Literal["int", "float", "word", "bool", "list"]
Scale = Literal["log", "linear", "words"]
_FIELD = b"esscher.column"  # metadata with the description as JSON


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


def with_ends(column: Column, interval: str = "interval") -> tuple[Column, Column, Column]:
    """The column, and two columns with the ends of its interval."""
    low, high = f"{column.key}_low", f"{column.key}_high"
    return (
        replace(column, ends=(low, high)),
        Column(low, "float", f"{column.label}, low", f"Lower end of its {interval}."),
        Column(high, "float", f"{column.label}, high", f"Upper end of its {interval}."),
    )


Declared = Mapping[str, Sequence[Column]]
"""Columns by table."""


def undeclared(key: str, kind: Kind) -> Column:
    """A column that nobody described: shown under its own name."""
    return Column(key, kind, key.replace("_", " "), f"Column {key} of the stored table.")


def declare(tables: Mapping[str, pa.Table], declared: Declared) -> dict[str, pa.Table]:
    """Tables whose fields carry their descriptions; missing columns are ignored."""
    found = {}
    for name, table in tables.items():
        known = {column.key: column for column in declared.get(name, ())}
        schema = [
            field.with_metadata({_FIELD: json.dumps(asdict(known[field.name]))})
            if field.name in known
            else field
            for field in table.schema
        ]
        found[name] = pa.Table.from_arrays(table.columns, schema=pa.schema(schema))
    return found


def columns_of(schema: pa.Schema) -> dict[str, Column]:
    """The columns of a stored table, in their order."""
    return {field.name: _column(field) for field in schema}


def _column(field: pa.Field) -> Column:
    stored = (field.metadata or {}).get(_FIELD)
    if stored is None:
        return undeclared(field.name, _kind(field.type))
    lists: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in json.loads(stored).items()
    }
    return Column(**{**lists, "key": field.name, "kind": _kind(field.type)})


def _kind(kind: pa.DataType) -> Kind:
    types = pa.types
    if types.is_boolean(kind):
        return "bool"
    if types.is_integer(kind):
        return "int"
    if types.is_floating(kind):
        return "float"
    return "list" if types.is_nested(kind) else "word"
