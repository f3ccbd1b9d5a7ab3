"""Local processes: the same tables as one process, whoever dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from esscher.runs import Progress, Run, RunError, RunIncomplete, execute, load_run, resume
from tests.runs.driver import Driver
from tests.runs.job import WalkSpec
from tests.runs.test_survive import kill_and_resume, wait_for_units


def children(pid: int) -> list[int]:
    """Workers a process has started and not yet collected."""
    started = psutil.Process(pid).children()
    return [child.pid for child in started if "resource_tracker" not in " ".join(child.cmdline())]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_two_processes_give_the_same_tables(
    folder: Path, same_tables: Callable[[Run], bool]
) -> None:
    """Though unit 2 ends its process when it is tried for the first time."""
    memory = folder / "memory"
    memory.mkdir()
    spec = WalkSpec(walks=15, work=3, threads=2, dying=(2,), deaths=1, memory=str(memory))
    seen: list[Progress] = []
    before = set(children(os.getpid()))
    run = execute(spec, folder / "run", workers=2, progress=seen.append)
    assert len(list(memory.glob("2.*"))) == 2
    assert {mark.read_text("utf-8") for mark in memory.iterdir()} == {"2"}
    assert same_tables(run)
    assert seen[-1].done == 15
    assert not any(is_running(pid) for pid in set(children(os.getpid())) - before)


@pytest.mark.slow
def test_four_processes_give_the_same_tables(
    folder: Path, same_tables: Callable[[Run], bool]
) -> None:
    assert same_tables(execute(WalkSpec(walks=30, work=3), folder / "run", workers=4))


@pytest.mark.slow
def test_units_that_always_fail_among_others(folder: Path) -> None:
    """Unit 1 ends its process, unit 5 raises, three times each; the others get done."""
    memory = folder / "memory"
    memory.mkdir()
    spec = WalkSpec(walks=9, dying=(1,), raising=(5,), memory=str(memory))
    with pytest.raises(RunIncomplete) as incomplete:
        execute(spec, folder / "run", workers=2)
    run = incomplete.value.run
    assert [failure.index for failure in run.failures] == [1, 5]
    assert run.failures[0].reason.startswith("its process was ended by signal 9, Killed")
    assert run.failures[1].reason == "ArithmeticError: walk 5 leads nowhere"
    assert [len(list(memory.glob(f"{unit}.*"))) for unit in (0, 1, 5)] == [1, 3, 3]
    assert run.table("ends")["walk"].tolist() == [0, 2, 3, 4, 6, 7, 8]


def test_workers_do_not_outlive_a_killed_writer(driver: Driver, folder: Path) -> None:
    pid = driver.start(
        "execute", WalkSpec(walks=50, seconds=0.5).as_dict(), folder / "run", workers=2
    )
    wait_for_units(folder / "run", 1)
    workers = children(pid)
    assert len(workers) == 2
    os.kill(pid, signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 60
    while (
        alive := [worker for worker in workers if is_running(worker)]
    ) and time.monotonic() < deadline:
        time.sleep(0.01)
    for worker in alive:
        os.kill(worker, signal.SIGKILL)
    assert alive == []
    assert load_run(folder / "run").status == "incomplete"


@pytest.mark.slow
def test_ctrl_c_with_workers(
    driver: Driver, folder: Path, same_tables: Callable[[Run], bool]
) -> None:
    pid = driver.start(
        "execute", WalkSpec(walks=20, seconds=0.2).as_dict(), folder / "run", workers=2
    )
    wait_for_units(folder / "run", 3)
    workers = children(pid)
    os.kill(pid, signal.SIGINT)
    code, said = driver.wait()
    assert code == 130
    assert "To continue: esscher resume" in said
    assert not any(is_running(worker) for worker in workers)
    assert same_tables(resume(folder / "run", workers=2))


@pytest.mark.slow
def test_killed_with_workers(
    driver: Driver, folder: Path, same_tables: Callable[[Run], bool]
) -> None:
    for after in (3, 17):
        run = kill_and_resume(
            driver, folder / str(after), WalkSpec(walks=40, seconds=0.05), after, 0.01, workers=2
        )
        assert same_tables(run)


@pytest.mark.slow
def test_a_full_disk_under_workers(
    disk: Callable[[str], Path], same_tables: Callable[[Run], bool]
) -> None:
    path = disk("size=96k") / "run"
    with pytest.raises(
        RunError, match=r"No space left on device; the \d+ of 40 units .* esscher resume"
    ):
        execute(WalkSpec(walks=40), path, workers=2)
    disk("size=4m")
    assert same_tables(resume(path))


def test_workers_that_cannot_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their job finds no model."""
    monkeypatch.setenv("ESSCHER_TEST_CANNOT_OPEN", "1")
    with pytest.raises(RunError, match=r"a worker cannot start: OSError: no model here"):
        execute(WalkSpec(), folder / "run", workers=2)
    monkeypatch.undo()
    assert load_run(folder / "run").status == "incomplete"
    assert resume(folder / "run").status == "complete"
