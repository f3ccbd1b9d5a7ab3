"""What a column is travels with its table: through shards, final tables and exported files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from esscher.runs import execute, load_run
from esscher.runs.columns import columns_of, declare, undeclared
from esscher.runs.tables import as_tables, decode_shard, encode_shard
from tests.runs.job import WalkSpec, columns

END, NAME, _ = columns(WalkSpec())["ends"]
HEADER = {"index": 0, "unit": {}, "job": "walk", "spec": {}, "spec_hash": "", "hashes": {}}
KINDS = {"walk": "int", "end": "float", "name": "word", "sign": "bool"}


def test_a_run_says_what_its_columns_are(tmp_path: Path) -> None:
    run = execute(WalkSpec(walks=2), tmp_path / "run")
    found = load_run(run.path).columns("ends")
    assert list(found) == list(run.table("ends").columns)
    assert {key: column.kind for key, column in found.items()} == KINDS
    assert (found["end"], found["name"]) == (END, NAME)
    assert (found["end"].header, found["name"].header) == ("end", "name")
    assert found["sign"] == undeclared("sign", "bool")
    assert run.columns("points")["step"].label == "step"
    with pytest.raises(ValueError, match="no table 'none'; there are: ends, points"):
        run.columns("none")


def test_finished_units_say_it_before_there_are_tables(tmp_path: Path) -> None:
    done = execute(WalkSpec(walks=3), tmp_path / "run")
    run = replace(done, manifest=done.manifest.model_copy(update={"tables": {}}))
    assert run.columns("ends")["end"] == END
    with pytest.raises(ValueError, match="no finished unit has a table 'none'"):
        run.columns("none")


def test_any_tool_reads_the_words(tmp_path: Path) -> None:
    run = execute(WalkSpec(walks=1), tmp_path / "run")
    words = json.loads(
        pq.read_schema(run.path / "ends.parquet").field("end").metadata[b"esscher.column"]
    )
    assert (words["label"], words["help"]) == ("place at the end", END.help)


def test_words_change_no_value_and_the_same_words_give_the_same_bytes() -> None:
    plain = as_tables(
        {"ends": {"end": [1.5, None], "name": ["a", "b"]}, "bare": {"x": [[1.0], []]}}
    )
    once = declare(plain, columns(WalkSpec()))
    assert once["ends"].to_pylist() == plain["ends"].to_pylist()
    assert once["bare"].equals(plain["bare"])
    again = encode_shard(as_tables(once), {})
    assert again == encode_shard(declare(plain, columns(WalkSpec())), {})
    back = decode_shard(encode_shard(once, HEADER), "x")[1]
    assert (
        columns_of(back["ends"].schema)
        == columns_of(once["ends"].schema)
        == {"end": END, "name": NAME}
    )
    assert columns_of(back["bare"].schema)["x"].kind == "list"


def test_words_of_other_programs_do_no_harm() -> None:
    strange = {b"label": b"\xff", b"other": b"1"}
    (column,) = columns_of(pa.schema([pa.field("a_b", pa.int64(), metadata=strange)])).values()
    assert column == undeclared("a_b", "int")
