"""Killed, interrupted, out of disk, two at once: nothing finished is lost, and the tables come out
the same.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from esscher.runs import Run, RunError, RunLocked, StoreError, execute, load_run, resume
from esscher.runs.store import Store, write_durable
from tests.runs.driver import Driver
from tests.runs.job import WalkSpec

KILLS = 20


def wait_for_units(path: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while Store(path).count() < count:
        assert time.monotonic() < deadline, f"{Store(path).count()} of {count} units"
        time.sleep(0.002)


def finished(path: Path) -> dict[str, int]:
    """Shards there are, and when they were written."""
    return {file.name: file.stat().st_mtime_ns for file in (path / "shards").glob("[0-9]*.parquet")}


def kill_and_resume(
    driver: Driver, path: Path, spec: WalkSpec, after: int, pause: float, workers: int
) -> Run:
    """Kill -9 a run some moment after it has so many units, then complete it; finished shards stay
    as they are.
    """
    pid = driver.start("execute", spec.as_dict(), path, workers=workers)
    wait_for_units(path, after)
    time.sleep(pause)
    with contextlib.suppress(ProcessLookupError):  # it was just done, and is gone
        os.kill(pid, signal.SIGKILL)
    code, _ = driver.wait()
    assert code in (-signal.SIGKILL, 0)  # 0: it was just done
    kept = finished(path)
    assert len(kept) >= after
    if code:
        assert not (path / "manifest.json").exists() or load_run(path).status in (
            "incomplete",
            "complete",
        )
    known = kept or (path / "manifest.json").exists()
    driver.start("resume" if known else "execute", spec.as_dict(), path)
    assert driver.wait() == (0, "")
    now = finished(path)
    assert len(now) == spec.walks
    assert {name: now[name] for name in kept} == kept
    return load_run(path)


def test_killed_at_twenty_random_moments(
    driver: Driver, folder: Path, same_tables: Callable[[Run], bool]
) -> None:
    """From before the first unit to after the last, while units, the manifest and the tables are
    written.
    """
    moments = random.Random(5)
    spec = WalkSpec(walks=40, seconds=0.002)
    for kill in range(KILLS):
        after = moments.choice([0, 40, *range(1, 40)]) if kill > 1 else kill * 40
        run = kill_and_resume(
            driver, folder / str(kill), spec, after, moments.random() * 0.01, workers=1
        )
        assert same_tables(run)
        shutil.rmtree(run.path)


def test_killed_again_and_again(
    driver: Driver, folder: Path, same_tables: Callable[[Run], bool]
) -> None:
    """One run, killed after every few units by whoever resumes it."""
    path, spec = folder / "run", WalkSpec(walks=40, seconds=0.005)
    pid = driver.start("execute", spec.as_dict(), path)
    for after in range(5, 40, 7):
        wait_for_units(path, after)
        os.kill(pid, signal.SIGKILL)
        assert driver.wait()[0] == -signal.SIGKILL
        pid = driver.start("resume", None, path)
    assert driver.wait() == (0, "")
    run = load_run(path)
    assert len(run.manifest.starts) == 6
    assert same_tables(run)


def test_two_writers_at_once(
    driver: Driver, folder: Path, same_tables: Callable[[Run], bool]
) -> None:
    path, spec = folder / "run", WalkSpec(walks=4, seconds=0.5)
    pid = driver.start("execute", spec.as_dict(), path)
    wait_for_units(path, 1)
    for second in (lambda: execute(spec, path), lambda: resume(path)):
        with pytest.raises(
            RunLocked, match=f"process {pid} on host {socket.gethostname()} is writing this run"
        ):
            second()
    run = load_run(path)
    assert run.status == "running"
    assert driver.wait() == (0, "")
    assert run.status == "complete"
    assert same_tables(load_run(path))


def test_ctrl_c_stops_cleanly(
    driver: Driver, folder: Path, same_tables: Callable[[Run], bool]
) -> None:
    path = folder / "run"
    pid = driver.start("execute", WalkSpec(walks=8, seconds=0.2).as_dict(), path)
    wait_for_units(path, 2)
    os.kill(pid, signal.SIGINT)
    code, said = driver.wait()
    done = len(finished(path))
    assert code == 130
    assert (
        said
        == f"{path}: stopped after {done} of 8 units, which are kept. To continue: esscher resume"
        f" {path}"
    )
    assert load_run(path).manifest.status == "incomplete"
    assert sorted(file.name for file in path.iterdir()) == [
        ".lock",
        "manifest.json",
        "shards",
    ]
    assert same_tables(resume(path))


def test_a_full_disk(disk: Callable[[str], Path], same_tables: Callable[[Run], bool]) -> None:
    path = disk("size=96k") / "run"
    spec = WalkSpec(walks=40)
    with pytest.raises(
        StoreError, match=r"No space left on device; the \d+ of 40 units .* esscher resume"
    ) as full:
        execute(spec, path)
    kept = finished(path)
    assert f"the {len(kept)} of 40 units that are finished are kept" in str(full.value)
    assert 5 < len(kept) < 40
    assert not list(path.rglob("*.tmp"))
    assert load_run(path).status == "incomplete"
    with pytest.raises(StoreError, match="No space left"):
        resume(path)
    disk("size=4m")
    run = resume(path)
    assert same_tables(run)
    assert {name: when for name, when in finished(path).items() if name in kept} == kept


def test_a_read_only_disk(disk: Callable[[str], Path], same_tables: Callable[[Run], bool]) -> None:
    folder = disk("size=4m")
    run = execute(WalkSpec(), folder / "run")
    (run.path / "shards" / "000001.parquet").unlink()
    disk("ro")
    try:
        with pytest.raises(StoreError, match="cannot be written"):
            execute(WalkSpec(), folder / "new")
        with pytest.raises(StoreError, match="cannot be written"):
            resume(run.path)
        assert len(load_run(run.path).table("ends")) == 6
    finally:
        disk("rw")
    assert same_tables(resume(run.path))


@pytest.mark.skipif(
    os.geteuid() == 0, reason="root may write everywhere; the read-only disk covers it"
)
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(StoreError, match="no permission"):
        execute(WalkSpec(), tmp_path / "run")


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    write_durable(tmp_path / "a", b"old")
    with pytest.raises(RunError, match="cannot be written: No such file"):
        write_durable(tmp_path / "none" / "a", b"new")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match="cannot be written: expected the name of a file"):
        write_durable(tmp_path / "folder", b"new")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "folder"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    run = execute(WalkSpec(), tmp_path / "run")
    left = [run.path / ".manifest.json.1.ab.tmp", run.path / "shards" / ".000001.parquet.1.ab.tmp"]
    for file in left:
        file.write_bytes(b"half")
    assert run.progress.done == 6
    resume(run.path)
    assert not any(file.exists() for file in left)
