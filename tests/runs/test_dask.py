"""Dask: a real scheduler and real workers, each a process of its own, one of which dies."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from esscher.runs import Progress, Run, RunError, RunIncomplete, execute, load_run, resume
from tests.runs.driver import ROOT
from tests.runs.job import WalkSpec

pytest.importorskip("distributed")


class ClusterProcesses:
    """A scheduler on the loopback and its workers."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder = folder
        self._file = folder / "scheduler.json"
        self._environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}",
            "OMP_NUM_THREADS": "1",
        }
        self.scheduler = self._start(
            "dask_scheduler",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--no-dashboard",
            "--scheduler-file",
            str(self._file),
        )
        deadline = time.monotonic() + 120
        while not self._file.exists() or not self._file.read_text("utf-8"):
            assert time.monotonic() < deadline
            assert self.scheduler.poll() is None, "the scheduler died"
            time.sleep(0.05)
        self.address: str = json.loads(self._file.read_text("utf-8"))["address"]
        self.workers = [self._worker(str(number)) for number in range(workers)]

    def _worker(self, name: str) -> subprocess.Popen[bytes]:
        return self._start(
            "dask_worker",
            self.address,
            "--nthreads",
            "1",
            "--no-nanny",
            "--no-dashboard",
            "--name",
            name,
            "--local-directory",
            str(self._folder),
        )

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"distributed.cli.{module}", *arguments]
        return subprocess.Popen(
            command, cwd=self._folder, env=self._environment, stderr=subprocess.DEVNULL
        )

    def end(self) -> None:
        for process in (*self.workers, self.scheduler):
            process.kill()
            process.wait()


@contextlib.contextmanager
def cluster(folder: Path, workers: int) -> Iterator[ClusterProcesses]:
    started = ClusterProcesses(folder, workers)
    try:
        yield started
    finally:
        started.end()


def test_a_worker_dies_and_the_tables_are_the_same(
    folder: Path, same_tables: Callable[[Run], bool]
) -> None:
    """Both have begun when one is killed; the other one finishes."""
    memory = folder / "memory"
    memory.mkdir()
    spec = WalkSpec(walks=24, seconds=0.1, memory=str(memory))
    killed = []
    with cluster(folder, workers=2) as dask:

        def kill(progress: Progress) -> None:
            at_work = {mark.name.split(".")[1] for mark in memory.iterdir()}
            if not killed and len(at_work) == 2 and progress.done >= 3:
                dask.workers[0].kill()
                killed.append(progress.done)

        run = execute(spec, folder / "run", dask=dask.address, progress=kill)
    assert killed
    assert killed[0] < 24
    assert run.manifest.starts[0].executor == f"dask {dask.address}"
    assert same_tables(run)


@pytest.mark.slow
def test_the_scheduler_dies(folder: Path, same_tables: Callable[[Run], bool]) -> None:
    """What had come back is kept, and another executor finishes."""
    with cluster(folder, workers=1) as dask:

        def kill(progress: Progress) -> None:
            if progress.done == 3:
                dask.scheduler.kill()

        with pytest.raises(
            RunError, match=r"scheduler at .* is gone.*the \d+ of 30 units .* esscher resume"
        ):
            execute(
                WalkSpec(walks=30, seconds=0.1), folder / "run", dask=dask.address, progress=kill
            )
    run = load_run(folder / "run")
    assert run.status == "incomplete"
    assert 3 <= run.progress.done < 30
    assert same_tables(resume(folder / "run"))


@pytest.mark.slow
def test_units_that_fail_on_a_cluster(folder: Path) -> None:
    with cluster(folder, workers=1) as dask, pytest.raises(RunIncomplete) as incomplete:
        execute(WalkSpec(raising=(4,)), folder / "run", dask=dask.address)
    (failure,) = incomplete.value.run.failures
    assert (failure.index, failure.reason) == (4, "ArithmeticError: walk 4 leads nowhere")
    assert len(incomplete.value.run.table("ends")) == 5


@pytest.mark.slow
def test_nobody_at_the_address(folder: Path) -> None:
    with pytest.raises(RunError, match=r"no Dask scheduler answers at tcp://127.0.0.1:9"):
        execute(WalkSpec(), folder / "run", dask="tcp://127.0.0.1:9")


def test_without_dask_a_line_says_how_to_install_it(folder: Path) -> None:
    """In a process whose imports of dask and distributed fail as if they were not installed."""
    program = f"""
import sys
sys.modules["distributed"] = sys.modules["dask"] = None
from esscher.runs import RunError, execute
from tests.runs.job import WalkSpec
try:
    execute(WalkSpec(), {str(folder / "run")!r}, dask="tcp://127.0.0.1:8786")
except RunError as refused:
    print(refused)
"""
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "pip install 'esscher[dask]'" in answer.stdout
    assert len(answer.stdout.splitlines()) == 1
