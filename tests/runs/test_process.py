"""What the machine says of processes: memory and cores."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time

import psutil
import pytest

from esscher.runs.progress import cores, memory_of


def test_memory_is_that_of_all_which_are_there() -> None:
    before = memory_of()
    held = bytearray(os.urandom(1 << 26))
    assert 0.9 * len(held) < memory_of() - before < 2 * len(held)
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=[600])
    alone = memory_of()
    child.start()
    try:
        deadline = time.monotonic() + 60
        while memory_of() <= alone + (1 << 20):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        child.kill()
        child.join()


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system binds no process to cores"
)
def test_cores_are_those_a_process_is_bound_to() -> None:
    bound = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}}); "
    asked = "from esscher.runs.progress import cores; print(cores())"
    assert subprocess.check_output([sys.executable, "-c", bound + asked], text=True) == "1\n"
    assert cores() == len(os.sched_getaffinity(0))


def test_cores_are_counted_where_no_process_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.delattr(psutil.Process, "cpu_affinity", raising=False)
    assert cores() == psutil.cpu_count()
