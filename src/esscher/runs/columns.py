"""What a column of a stored table is, in words: declared by the job that fills it, stored with the
table, read by who shows it.

The words travel as metadata of the Parquet field, under the names of the fields of :class:`Column`;
the kind is the field's own type. Reading them needs no code of the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import pyarrow as pa

Kind = Literal["int", "float", "word", "bool", "list"]
Scale = Literal["log", "linear", "words"]
# fields that are one text, stored as it is
TEXTS = ("label", "help", "short", "metric", "of", "status", "formula")


@dataclass(frozen=True)
class Column:
    """A column as tables and pictures show it.

    ``scale``: how a picture shows it by colour or along an axis; None where none does. ``first``:
    columns that have one come before the others, the smallest first. ``short``: the label where
    there is little room. ``ends``: the columns that hold the lower and the upper end of its
    interval. ``words``: those a column of words may hold, in their order; ``meanings``: what each
    stands for. Of exponents: ``metric``, of a measured one, is the error it was fitted to; ``of``,
    of one that theory gives, is the column it is a function of, ``status`` how it is known (proved,
    heuristic, experimental, exact) and ``formula`` what a picture calls it.
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
    """A column nobody described: shown under its own name."""
    return Column(key, kind, key.replace("_", " "), f"Column {key} of the stored table.")


def declare(tables: Mapping[str, pa.Table], declared: Declared) -> dict[str, pa.Table]:
    """Tables whose fields carry what is declared of them; a declared column that a table does not
    have is no matter.
    """
    return {name: _declare(table, declared.get(name, ())) for name, table in tables.items()}


def _declare(table: pa.Table, columns: Sequence[Column]) -> pa.Table:
    words = {column.key: _metadata(column) for column in columns}
    fields = [
        field.with_metadata(words[field.name]) if field.name in words else field
        for field in table.schema
    ]
    return pa.Table.from_arrays(table.columns, schema=pa.schema(fields)) if words else table


def columns_of(schema: pa.Schema) -> dict[str, Column]:
    """The columns of a stored table, in their order."""
    return {field.name: _column(field) for field in schema}


def _metadata(column: Column) -> dict[str, str]:
    known = {"scale": column.scale} | {name: getattr(column, name) for name in TEXTS}
    known["first"] = None if column.first is None else str(column.first)
    known["ends"] = None if column.ends is None else " ".join(column.ends)
    known |= {"words": "\n".join(column.words), "meanings": "\n".join(column.meanings)}
    return {name: text for name, text in known.items() if text}


def _column(field: pa.Field) -> Column:
    """Other programs may write metadata too: what is not ours to read is left out."""
    plain = undeclared(field.name, _kind(field.type))
    known = {
        name.decode("utf-8", "replace"): text.decode("utf-8", "replace")
        for name, text in (field.metadata or {}).items()
    }
    ends = known.get("ends", "").split()
    return Column(
        key=plain.key,
        kind=plain.kind,
        label=known.get("label", plain.label),
        help=known.get("help", plain.help),
        scale=next((scale for scale in get_args(Scale) if scale == known.get("scale")), None),
        first=int(known["first"]) if known.get("first", "").isdecimal() else None,
        ends=(ends[0], ends[1]) if len(ends) == 2 else None,
        words=tuple(known.get("words", "").splitlines()),
        meanings=tuple(known.get("meanings", "").splitlines()),
        **{name: known.get(name, "") for name in TEXTS[2:]},
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
