"""Reading a run and taking it elsewhere: without torch, without the job, in the formats of
others.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from esscher.runs import Run, RunError, RunIncomplete, execute, export_run, load_run
from tests.runs.job import WalkSpec

READER = """
import sys
sys.modules["torch"] = None
from esscher.runs import JOBS, export_run, list_runs, load_run
run = load_run(sys.argv[1])
assert "walk" not in JOBS
assert len(run.table("points")) == 10_003
assert len(run.partial("points")) == 10_003
assert [run.path.name for run in list_runs(sys.argv[2])] == ["run"]
export_run(sys.argv[1], "csv", sys.argv[2] + "/csv")
others = [name for name in sys.modules if name.startswith("esscher.") and not name.startswith("esscher.runs")]
assert not others, others
assert not frozenset(["scipy", "dask", "distributed", "rich", "transformers"]).intersection(sys.modules)
"""  # noqa: E501


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """10,003 points and 4 ends."""
    return execute(WalkSpec(walks=4, steps=2500), tmp_path / "run")


def test_reading_needs_neither_torch_nor_the_job(run: Run, tmp_path: Path) -> None:
    arguments = [str(run.path), str(run.path.parent)]
    subprocess.run([sys.executable, "-c", READER, *arguments], check=True, cwd=tmp_path)
    assert len(pd.read_csv(tmp_path / "csv" / "points.csv")) == 10_003


def test_export(run: Run, tmp_path: Path) -> None:
    ends = run.table("ends")
    assert [file.name for file in export_run(run.path, "csv", tmp_path / "csv")] == [
        "ends.csv",
        "points.csv",
    ]
    assert pd.read_csv(tmp_path / "csv" / "ends.csv").to_dict() == ends.to_dict()
    file, _ = export_run(run.path, "json", tmp_path / "json")
    assert json.loads(file.read_text("utf-8")) == ends.to_dict("records")


def test_what_cannot_be_exported(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one of csv, json, got 'xlsx'"):
        export_run(run.path, "xlsx", tmp_path)
    with pytest.raises(RunIncomplete):
        execute(WalkSpec(walks=1, raising=(0,)), tmp_path / "failed")
    with pytest.raises(RunError, match=r"no tables to export yet \(incomplete\)"):
        export_run(tmp_path / "failed", "csv", tmp_path)


def test_a_damaged_table_is_not_exported(run: Run, tmp_path: Path) -> None:
    file = run.path / "ends.parquet"
    file.write_bytes(file.read_bytes()[:-1])
    for to in ("csv", "json"):
        with pytest.raises(RunError, match="damaged"):
            export_run(load_run(run.path).path, to, tmp_path / to)
