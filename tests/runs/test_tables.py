"""Stored bytes: the same tables give the same file, and any changed byte is noticed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from esscher.runs import Damaged, Shard, concatenate
from esscher.runs.tables import (
    as_table,
    as_tables,
    decode_shard,
    decode_table,
    encode_shard,
    encode_table,
)

HEADER = {
    "index": 3,
    "unit": {"layer": 1},
    "job": "walk",
    "spec": {"seed": 0},
    "spec_hash": "",
    "hashes": {},
}


def example() -> dict[str, pa.Table]:
    return as_tables(
        {
            "heads": pd.DataFrame(
                {"name": ["a", None, "ü"], "kind": pd.Categorical(["x", "y", "x"]), "n": [1, 2, 3]}
            ),
            "curves": {
                "rms": np.array([1e-300, -0.0, np.nan, np.inf]),
                "path": [[1], [], None, [2, 3]],
            },
            "rows": [{"flag": True, "word": "w"}, {"flag": None, "word": None}],
            "nothing": pa.table({"n": pa.array([], pa.int64()), "s": pa.array([], pa.string())}),
        }
    )


def test_tables_come_back_as_they_were() -> None:
    header, back = decode_shard(encode_shard(example(), HEADER), "x")
    assert header == HEADER
    assert list(back) == ["curves", "heads", "nothing", "rows"]
    for name, table in example().items():
        assert back[name].schema == table.schema
        # NaN is not equal to itself, so bytes are compared; Parquet gives lists another inner name,
        # hence the round
        once = decode_table(encode_table(table, {}), "x")[1]
        assert encode_table(back[name], {}) == encode_table(once, {})
    assert back["heads"].to_pylist()[2] == {"name": "ü", "kind": "x", "n": 3}
    assert back["nothing"].num_rows == 0


def test_a_unit_may_find_nothing() -> None:
    assert decode_shard(encode_shard({}, HEADER), "x") == (HEADER, {})


def test_the_same_tables_give_the_same_bytes() -> None:
    once = encode_shard(example(), HEADER)
    assert encode_shard(example(), dict(reversed(HEADER.items()))) == once
    pieces = {name: pa.concat_tables([t.slice(0, 1), t.slice(1)]) for name, t in example().items()}
    assert encode_shard(as_tables(pieces), HEADER) == once


def test_any_tool_reads_them() -> None:
    file = pa.BufferReader(encode_table(example()["heads"], HEADER))
    assert pq.read_table(file).column("n").to_pylist() == [1, 2, 3]
    assert json.loads(pq.read_metadata(file).metadata[b"esscher.header"]) == HEADER


@pytest.mark.parametrize(
    ("data", "decode"),
    [
        (encode_shard(example(), HEADER), decode_shard),
        (encode_table(example()["curves"], HEADER), decode_table),
    ],
    ids=["shard", "table"],
)
def test_every_flipped_byte_and_every_cut_is_noticed(
    data: bytes, decode: Callable[[bytes, str], Any]
) -> None:
    """Each byte of the file in turn, each with another bit."""
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        with pytest.raises(Damaged, match="damaged"):
            decode(bytes(flipped), "x")
        with pytest.raises(Damaged, match="damaged"):
            decode(data[:place], "x")
    with pytest.raises(Damaged):
        decode(data + b"\0", "x")
    decode(data, "x")


def test_page_checksums_alone_would_miss_flipped_bits() -> None:
    """Parquet's own: why a file has a checksum of its own. Once they miss nothing, they can take
    its place.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(example()["curves"], sink, write_page_checksum=True, write_statistics=False)
    data = sink.getvalue().to_pybytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    missed = []
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        with contextlib.suppress(OSError, ValueError, pa.ArrowException):
            pq.ParquetFile(pa.BufferReader(bytes(flipped)), page_checksum_verification=True).read(
                use_threads=False
            )
            missed.append(place)
    assert min(missed) < footer < max(missed)


def test_a_tensor_is_a_column() -> None:
    table = as_table({"x": torch.tensor([1.5, 2.5], dtype=torch.float64)}, "t")
    assert table.to_pylist() == [{"x": 1.5}, {"x": 2.5}]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"../evil": {"x": [1]}}, "small letters"),
        ({"": {"x": [1]}}, "small letters"),
        ({"t": {}}, "at least one column"),
        ([1], "tables by name"),
        ({"t": pa.table([pa.array([1]), pa.array([2])], names=["a", "a"])}, "distinct"),
    ],
)
def test_what_is_no_table_is_refused(value: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        as_tables(value)


def shards(*columns: dict[str, list[Any]]) -> list[Shard]:
    return [Shard(i, {"i": i}, {"t": as_table(column, "t")}) for i, column in enumerate(columns)]


def test_rows_follow_the_units_and_types_meet() -> None:
    joined = concatenate(None, shards({"x": [1, 2], "y": [None, None]}, {"y": ["a"], "x": [0.5]}))[
        "t"
    ]
    assert joined.to_pylist() == [
        {"x": 1.0, "y": None},
        {"x": 2.0, "y": None},
        {"x": 0.5, "y": "a"},
    ]


def test_types_that_do_not_meet_are_named() -> None:
    with pytest.raises(ValueError, match="columns differ in type"):
        concatenate(None, shards({"x": [1]}, {"x": ["a"]}))
