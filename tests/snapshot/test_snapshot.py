"""The tables of small runs, kept: names, order, types, and values to 1e-10, or to what sums in
float32 are known to.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tests.snapshot.runs import RUNS
from tests.snapshot.tables import CLOSE, SINGLE, differences, kept, tables_of


@pytest.mark.parametrize("name", RUNS)
def test_tables_are_those_kept(name: str, tmp_path: Path) -> None:
    RUNS[name](tmp_path / name)
    found = tables_of(tmp_path / name)
    expected = {path.stem: pd.read_parquet(path) for path in sorted(kept(name).glob("*.parquet"))}
    assert expected
    assert sorted(found) == sorted(expected)
    close = SINGLE.get(name, CLOSE)
    assert [
        line
        for table in expected
        for line in differences(table, found[table], expected[table], close)
    ] == []


def test_a_changed_number_a_type_and_a_column_are_seen() -> None:
    kept_rows = pd.DataFrame({"n": [1, 2], "rms": [0.5, 0.25], "word": ["a", "b"]})
    assert differences("t", kept_rows.copy(), kept_rows) == []
    assert "rms" in differences("t", kept_rows.assign(rms=[0.5, 0.25 * (1 + 1e-9)]), kept_rows)[0]
    assert "type" in differences("t", kept_rows.astype({"n": "int32"}), kept_rows)[0]
    assert "columns" in differences("t", kept_rows[["rms", "n", "word"]], kept_rows)[0]
    assert "word" in differences("t", kept_rows.assign(word=["a", "c"]), kept_rows)[0]
    assert "rows" in differences("t", kept_rows[:1], kept_rows)[0]
