"""Tables and the bytes they are stored as: Parquet with a header and a checksum of the whole file
in its metadata.

The same tables give the same bytes, whatever the time, the host and the order of arrival; only the
version of pyarrow enters. Parquet's own page checksums leave out the footer and the pages' headers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from esscher.runs.errors import NAME, Damaged
from esscher.runs.spec import Unit, canonical_json

_NOTHING = "_"
_MARK = b"sha256:"
_BLANK = b"0" * 64
_OPTIONS: dict[str, Any] = {"compression": "zstd", "version": "2.6", "write_statistics": False}


@dataclass(frozen=True)
class Shard:
    """What one unit produced."""

    index: int
    unit: Unit
    tables: Mapping[str, pa.Table]


def as_table(value: Any, name: str) -> pa.Table:
    """A plain Arrow table from a table, a pandas frame, a mapping of columns or a list of rows."""
    if isinstance(value, pa.Table):
        table = value
    elif isinstance(value, Mapping):
        table = pa.table({column: _column(values) for column, values in value.items()})
    elif isinstance(value, list):
        table = pa.Table.from_pylist(value)
    else:
        table = pa.Table.from_pandas(value, preserve_index=False)
    if table.num_columns == 0:
        raise ValueError(f"table {name}: expected at least one column, got none")
    if len(set(table.column_names)) < table.num_columns:
        raise ValueError(f"table {name}: expected distinct column names, got {table.column_names}")
    # A category is stored as its value: its codes differ from unit to unit.
    plain = pa.schema([field.with_type(_plain(field.type)) for field in table.schema])
    if plain.types != table.schema.types:
        table = table.cast(plain)
    return table.replace_schema_metadata(None).combine_chunks()


def as_tables(values: Any) -> dict[str, pa.Table]:
    """Tables by name, names fit for files."""
    if not isinstance(values, Mapping):
        raise TypeError(f"expected tables by name, got {type(values).__name__}")
    for name in values:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(f"table {name!r}: expected a name of small letters, digits and _")
    return {name: as_table(values[name], name) for name in sorted(values)}


def _column(values: Any) -> Any:
    """numpy arrays from what converts to one (a tensor, say); Arrow takes the rest as it is."""
    arrow = isinstance(values, pa.Array | pa.ChunkedArray)
    return np.asarray(values) if hasattr(values, "__array__") and not arrow else values


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    return pa.string() if pa.types.is_large_string(kind) else kind


def concatenate(spec: Any, shards: Sequence[Shard]) -> dict[str, pa.Table]:
    """Rows of all units in the order of units: the default way to final tables."""
    pieces: dict[str, list[pa.Table]] = {}
    for shard in shards:
        for name, table in shard.tables.items():
            pieces.setdefault(name, []).append(table)
    try:
        return {
            name: pa.concat_tables(pieces[name], promote_options="permissive").combine_chunks()
            for name in sorted(pieces)
        }
    except (pa.ArrowInvalid, pa.ArrowTypeError) as cause:
        raise ValueError(f"columns differ in type from unit to unit: {cause}") from cause


def encode_shard(tables: Mapping[str, pa.Table], header: Mapping[str, Any]) -> bytes:
    """Several tables as one file: one row, each table a column that holds a list of its rows."""
    columns = {}
    for name, table in tables.items():
        arrays = [column.combine_chunks() for column in table.columns]
        rows = pa.StructArray.from_arrays(arrays, fields=list(table.schema))
        ends = pa.array([0, table.num_rows], pa.int64())
        columns[name] = pa.LargeListArray.from_arrays(ends, rows)
    # A unit may find nothing, and Parquet wants a column.
    return encode_table(pa.table(columns or {_NOTHING: pa.nulls(1, pa.int8())}), header)


def decode_shard(data: bytes, origin: str) -> tuple[dict[str, Any], dict[str, pa.Table]]:
    """Header and tables of a shard whose checksum holds."""
    header, row = decode_table(data, origin)
    tables = {}
    for name in row.column_names:
        if name != _NOTHING:
            rows = row.column(name).combine_chunks().flatten()
            schema = pa.schema(list(rows.type))
            tables[name] = pa.Table.from_arrays(rows.flatten(), schema=schema)
    return header, tables


def encode_table(table: pa.Table, header: Mapping[str, Any]) -> bytes:
    """A table as a Parquet file whose checksum was taken with zeros in its own place."""
    metadata = {
        "esscher.header": canonical_json(dict(header)),
        "esscher.checksum": (_MARK + _BLANK).decode(),
    }
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, **_OPTIONS) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(metadata)
    data = bytearray(sink.getvalue())
    place = data.rfind(_MARK + _BLANK) + len(_MARK)
    data[place : place + 64] = hashlib.sha256(data).hexdigest().encode()
    return bytes(data)


def decode_table(data: bytes, origin: str) -> tuple[dict[str, Any], pa.Table]:
    """Header and table of a file; Damaged where its checksum does not hold."""
    view, place = memoryview(data), data.rfind(_MARK) + len(_MARK)
    blank = hashlib.sha256(view[:place])
    blank.update(_BLANK)
    blank.update(view[place + 64 :])
    if blank.hexdigest() != checksum_of(data):
        raise Damaged(f"{origin}: damaged: its content does not match its checksum")
    file = pq.ParquetFile(pa.BufferReader(data))
    header: dict[str, Any] = json.loads(file.metadata.metadata[b"esscher.header"])
    return header, file.read(use_threads=False).replace_schema_metadata(None)


def checksum_of(data: bytes) -> str:
    """The checksum a file carries."""
    place = data.rfind(_MARK) + len(_MARK)
    return data[place : place + 64].decode("ascii", "replace")
