"""A run from spec to tables: what is stored, what is skipped, what is done again, what is
refused.
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from esscher.report.words import warnings_of
from esscher.runs import (
    Damaged,
    Progress,
    Run,
    RunError,
    RunIncomplete,
    RunInterrupted,
    execute,
    list_runs,
    load_run,
    resume,
    terminal,
)
from esscher.runs.executors import compute_remotely
from esscher.runs.run import LOCK, versions
from esscher.runs.spec import digest
from esscher.runs.store import is_held
from tests.runs.job import SummarySpec, WalkSpec


def tries(folder: Path) -> list[int]:
    """Units in the order of their tries, by the marks they left."""
    marks = sorted(folder.iterdir(), key=lambda mark: int(mark.name.split(".")[2]))
    return [int(mark.name.split(".")[0]) for mark in marks]


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


def edit(path: Path, **changes: Any) -> None:
    manifest = json.loads((path / "manifest.json").read_text("utf-8"))
    (path / "manifest.json").write_text(json.dumps({**manifest, **changes}), "utf-8")


def test_a_run_holds_its_results_and_where_they_come_from(tmp_path: Path) -> None:
    run = execute(WalkSpec(seed=3), tmp_path / "run")
    assert (run.status, run.failures, run.tables, run.spec["seed"]) == (
        "complete",
        (),
        ["ends", "points"],
        3,
    )
    assert (run.progress.done, run.progress.total) == (6, 6)
    points = run.table("points")
    assert list(points.columns) == ["walk", "step", "place"]
    assert points["walk"].tolist() == [w for w in range(6) for _ in range(5 + w % 3)]
    steps = np.random.default_rng(WalkSpec(seed=3).unit_seed({"walk": 4}))
    steps.normal(size=(64, 64))
    assert (
        points.loc[points["walk"] == 4, "place"].tolist()
        == np.cumsum(steps.normal(size=6)).tolist()
    )
    manifest = json.loads((run.path / "manifest.json").read_text("utf-8"))
    assert manifest["spec_hash"] == WalkSpec(seed=3).hash
    assert manifest["tables"] == {"ends": 6, "points": len(points)}
    assert {"python", "numpy", "torch", "pyarrow", "esscher"} <= set(
        manifest["starts"][0]["versions"]
    )
    names = ("seed", "device", "dtype", "threads")
    assert [manifest["spec"][name] for name in names] == [3, "cpu", "float64", 1]
    assert sorted(path.name for path in run.path.iterdir()) == [
        ".lock",
        "ends.parquet",
        "manifest.json",
        "points.parquet",
        "shards",
    ]
    assert len(list((run.path / "shards").iterdir())) == 6


def test_what_is_finished_is_not_done_again(
    tmp_path: Path, memory: Path, same_tables: Callable[[Run], bool]
) -> None:
    spec = WalkSpec(memory=str(memory))
    path = execute(spec, tmp_path / "run").path
    assert tries(memory) == list(range(6))
    files = [file for file in path.rglob("*") if file.is_file() and file.name != LOCK]
    before = {file: os.stat(file).st_mtime_ns for file in files}
    resume(path)
    execute(spec, path)
    assert {file: os.stat(file).st_mtime_ns for file in files} == before
    for index in (1, 4):
        (path / "shards" / f"{index:06d}.parquet").unlink()
    assert same_tables(resume(path))
    assert tries(memory)[6:][:2] == [1, 4]


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "swap", "other"])
def test_a_damaged_shard_is_done_again_and_named(
    harm: str,
    tmp_path: Path,
    memory: Path,
    same_tables: Callable[[Run], bool],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = execute(WalkSpec(memory=str(memory)), tmp_path / "run").path
    shard = path / "shards" / "000002.parquet"
    data = shard.read_bytes()
    if harm == "cut":
        shard.write_bytes(data[: len(data) // 2])
    elif harm == "flip":
        shard.write_bytes(data[:200] + bytes([data[200] ^ 4]) + data[201:])
    elif harm == "empty":
        shard.write_bytes(b"")
    elif harm == "swap":
        shutil.copy(path / "shards" / "000003.parquet", shard)
    else:
        other = execute(WalkSpec(seed=1), tmp_path / "other").path
        shutil.copy(other / "shards" / "000002.parquet", shard)
    with caplog.at_level(logging.WARNING):
        run = resume(path)
    assert same_tables(run)
    assert tries(memory)[6:][:1] == [2]
    (note,) = run.manifest.notes
    assert str(shard) in note
    assert "damaged" in note
    assert "computed again" in note
    assert note in caplog.text


def test_a_damaged_table_is_noticed_and_made_again(
    tmp_path: Path, same_tables: Callable[[Run], bool]
) -> None:
    run = execute(WalkSpec(), tmp_path / "run")
    file = run.path / "ends.parquet"
    file.write_bytes(file.read_bytes()[:-30] + b"?" + file.read_bytes()[-29:])
    with pytest.raises(Damaged, match=r"ends.parquet: damaged"):
        run.table("ends")
    run.table("points")
    assert same_tables(resume(run.path))


@pytest.mark.parametrize("content", ["", "[]", '{"schema_version": 1}', '{"job": "wal'])
def test_a_damaged_manifest_is_refused(content: str, tmp_path: Path) -> None:
    run = execute(WalkSpec(), tmp_path / "run")
    (run.path / "manifest.json").write_text(content, "utf-8")
    for read in (load_run, resume, lambda path: execute(WalkSpec(), path)):
        with pytest.raises(
            RunError, match=r"manifest\.json: .*start the run again|written in schema"
        ):
            read(run.path)
    assert run.progress.done == 6  # nothing is removed


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such run directory"):
        load_run(tmp_path / "none")
    with pytest.raises(RunError, match="no such run directory"):
        resume(tmp_path / "none")
    (tmp_path / "notes.txt").touch()
    for read in (load_run, resume):
        with pytest.raises(RunError, match="not a run directory"):
            read(tmp_path)
    with pytest.raises(RunError, match=r"holds 'notes.txt' and no run"):
        execute(WalkSpec(), tmp_path)
    with pytest.raises(RunError, match="is a file"):
        execute(WalkSpec(), tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_another_run_is_refused_with_the_difference(tmp_path: Path) -> None:
    path = execute(WalkSpec(), tmp_path / "run").path
    with pytest.raises(RunError, match=r"another run: seed is 0 there, steps is 5 there"):
        execute(WalkSpec(seed=1, steps=6), path)
    assert execute(WalkSpec(), path).status == "complete"
    (path / "manifest.json").unlink()
    with pytest.raises(RunError, match=r"holds .* and no run"):
        execute(WalkSpec(), path)


def test_changed_data_is_refused(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.write_text("one", "utf-8")
    run = execute(WalkSpec(corpus=str(corpus)), tmp_path / "run")
    assert run.manifest.hashes == {"corpus": "one"}
    corpus.write_text("two", "utf-8")
    with pytest.raises(RunError, match="its corpus changed since it began"):
        resume(run.path)


def test_a_changed_manifest_is_refused(tmp_path: Path) -> None:
    path = execute(WalkSpec(), tmp_path / "run").path
    kept = (path / "manifest.json").read_text("utf-8")
    edit(path, spec={**WalkSpec().as_dict(), "seed": 5})
    with pytest.raises(RunError, match="the spec in it was changed"):
        resume(path)
    (path / "manifest.json").write_text(kept, "utf-8")
    for schema in (9, 0):
        edit(path, schema_version=schema)
        for read in (load_run, resume):
            with pytest.raises(RunError, match=f"written in schema {schema} by another esscher"):
                read(path)
    evil = {**WalkSpec().as_dict(), "job": "os:system"}
    edit(path, schema_version=1, job="os:system", spec=evil, spec_hash=digest(evil))
    with pytest.raises(ValueError, match="not registered"):
        resume(path)


def test_other_versions_are_noted(tmp_path: Path) -> None:
    path = execute(WalkSpec(), tmp_path / "run").path
    starts = json.loads((path / "manifest.json").read_text("utf-8"))["starts"]
    starts[0]["versions"]["numpy"] = "1.0"
    edit(path, starts=starts, status="running")
    run = resume(path)
    assert any("other versions" in note and "numpy" in note for note in run.manifest.notes)
    assert len(run.manifest.starts) == 2


def test_a_failing_unit_is_recorded_and_stops_no_other(
    tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = WalkSpec(raising=(1, 3), memory=str(memory))
    with pytest.raises(RunIncomplete) as incomplete:
        execute(spec, tmp_path / "run")
    run = incomplete.value.run
    assert incomplete.value.resume == f"esscher resume {tmp_path / 'run'}"
    assert incomplete.value.resume in str(incomplete.value)
    assert "2 of 6 units failed (the first: unit 1, ArithmeticError: walk 1 leads nowhere)" in str(
        incomplete.value
    )
    assert run.status == "incomplete"
    assert [(f.index, f.unit, f.reason) for f in run.failures] == [
        (w, {"walk": w}, f"ArithmeticError: walk {w} leads nowhere") for w in (1, 3)
    ]
    assert 'raise ArithmeticError(f"walk' in run.failures[0].traceback
    assert run.table("ends")["walk"].tolist() == [0, 2, 4, 5]
    assert sorted(tries(memory)) == sorted([0, 2, 4, 5] + [1, 3] * 3)
    assert "unit 3 {'walk': 3} failed 3 times" in caplog.text
    with pytest.raises(RunIncomplete):
        resume(run.path)
    assert sorted(tries(memory)) == sorted([0, 2, 4, 5] + [1, 3] * 6)


def test_when_every_unit_fails_there_are_no_tables(tmp_path: Path) -> None:
    with pytest.raises(RunIncomplete):
        execute(WalkSpec(walks=2, raising=(0, 1)), tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.tables == []
    with pytest.raises(ValueError, match=r"no tables yet, 0 of 2 units .*\(incomplete\)"):
        run.table("ends")


def test_an_unfinished_run_shows_what_it_has(
    tmp_path: Path, same_tables: Callable[[Run], bool]
) -> None:
    def stop(progress: Progress) -> None:
        if progress.done == 2 and not progress.ended:
            raise KeyboardInterrupt

    with pytest.raises(
        RunInterrupted, match=r"stopped after 2 of 6 units, .* To continue: esscher resume"
    ) as stopped:
        execute(WalkSpec(), tmp_path / "run", progress=stop)
    assert stopped.value.resume == f"esscher resume {tmp_path / 'run'}"
    run = load_run(tmp_path / "run")
    assert (run.status, run.progress.done, run.tables) == ("incomplete", 2, [])
    assert run.partial("ends")["walk"].tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"2 of 6 units are done .* partial\('ends'\)"):
        run.table("ends")
    with pytest.raises(ValueError, match="there are: ends, points"):
        run.partial("none")
    assert any("Ctrl-C" in line for line in warnings_of(run))
    complete = resume(run.path)
    assert same_tables(complete)
    assert warnings_of(complete) == []  # what stopped it before is no matter of a complete run
    edit(run.path, status="running")  # as a killed run leaves it
    assert load_run(run.path).status == "incomplete"
    with pytest.raises(ValueError, match="no table 'none'; there are: ends, points"):
        complete.table("none")


def test_a_callback_sees_every_unit(tmp_path: Path) -> None:
    seen: list[Progress] = []
    execute(WalkSpec(seconds=0.01), tmp_path / "run", progress=seen.append)
    assert [progress.done for progress in seen] == [0, 1, 2, 3, 4, 5, 6, 6]
    assert all(progress.total == 6 for progress in seen)
    assert all(progress.rate and 0 < progress.rate < 100 for progress in seen[1:])
    assert seen[3].seconds_left == pytest.approx((6 - 3) / seen[3].rate)
    assert [progress.ended for progress in seen] == [False] * 7 + [True]


@pytest.mark.parametrize("workers", [1, 2])
def test_units_say_how_far_they_are(workers: int, tmp_path: Path) -> None:
    seen: list[Progress] = []
    execute(
        WalkSpec(walks=4, telling=4, seconds=0.01),
        tmp_path / "run",
        workers=workers,
        progress=seen.append,
    )
    told = [progress.done + progress.under_way for progress in seen if not progress.ended]
    assert {progress.under_way % 0.25 for progress in seen} == {0.0}
    assert any(progress.under_way for progress in seen)
    assert told == sorted(told)
    assert seen[-1].under_way == 0
    part = next(progress for progress in seen if progress.under_way)
    assert part.seconds_left == pytest.approx((4 - part.done - part.under_way) / part.rate)
    assert part.line().startswith(f"{part.done + part.under_way:.1f}/4 units, ")


def test_the_time_left_knows_what_units_cost(tmp_path: Path) -> None:
    seen: list[Progress] = []
    execute(WalkSpec(uneven=True), tmp_path / "run", progress=seen.append)
    first, second = (progress for progress in seen[1:3])
    assert (first.done, second.done) == (1, 2)
    assert first.seconds_left * first.rate == pytest.approx(5 / 3)
    assert second.seconds_left * second.rate == pytest.approx(2 * 4 / 4)


def test_what_a_spec_leaves_open_is_found_once(tmp_path: Path) -> None:
    run = execute(WalkSpec(open_steps=True), tmp_path / "run")
    assert (run.manifest.spec["steps"], run.manifest.spec["open_steps"]) == (7, False)
    again = execute(WalkSpec(open_steps=True), tmp_path / "run")
    assert len(again.manifest.starts) == 1


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    stream = io.StringIO()
    with pytest.raises(RunIncomplete):
        execute(WalkSpec(raising=(2,)), tmp_path / "run", progress=terminal(stream, every=1e9))
    first, failure, last = stream.getvalue().splitlines()
    assert first == "0/6 units"
    assert "unit 2 {'walk': 2} failed 3 times" in failure
    assert last.startswith("5/6 units, 1 failed, ")
    assert Progress(1, 9, rate=0.5, seconds_left=3723.0).line() == "1/9 units, 0.5/s, 1:02:03 left"


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with pytest.raises(RunIncomplete):
        execute(WalkSpec(raising=(2,)), tmp_path / "run", progress=terminal(stream))
    shown = stream.getvalue()
    assert "failed 3 times" in shown
    assert "5/6 units, 1 failed" in shown
    assert "━" in shown


def test_runs_of_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("b", "a", "damaged"):
        execute(WalkSpec(), tmp_path / name)
    edit(tmp_path / "a", started="2020-01-01T00:00:00+00:00")
    edit(tmp_path / "b", started="2021-01-01T00:00:00+00:00")
    (tmp_path / "damaged" / "manifest.json").write_text("{", "utf-8")
    (tmp_path / "nothing").mkdir()
    with caplog.at_level(logging.WARNING):
        assert [run.path.name for run in list_runs(tmp_path)] == ["a", "b"]
    assert "manifest.json: damaged" in caplog.text
    assert "nothing" not in caplog.text
    with pytest.raises(RunError, match="no such folder"):
        list_runs(tmp_path / "none")


def test_a_job_may_make_its_own_final_tables(tmp_path: Path) -> None:
    """And each unit has the threads of its spec, which are given back."""
    before = torch.get_num_threads()
    run = execute(SummarySpec(threads=before + 2), tmp_path / "run")
    assert run.table("summary").to_dict("list") == {"sum": [8.0], "threads": [before + 2]}
    assert torch.get_num_threads() == before
    assert run.tables == ["summary"]


def test_final_tables_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        execute(SummarySpec(fails=True), tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert (run.status, run.progress.done) == ("failed", 3)
    assert "ZeroDivisionError: no mean of nothing" in warnings_of(run)
    assert not is_held(run.path / LOCK)


def test_a_worker_elsewhere_with_other_versions_is_refused() -> None:
    header = {"job": "walk", "spec": WalkSpec().as_dict()}
    order = json.dumps({"entry": "tests.runs.job:WALK", "header": header})
    here = versions()
    assert compute_remotely(order, 2, {"walk": 2}, here)
    with pytest.raises(
        RuntimeError, match=rf"the worker has numpy {here['numpy']} instead of 1.0; give it"
    ):
        compute_remotely(order, 2, {"walk": 2}, {**here, "numpy": "1.0"})


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": -2}, {"workers": "2"}])
def test_bad_options_are_named(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        execute(WalkSpec(), tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
