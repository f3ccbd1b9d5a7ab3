"""What the machine says of processes: cores."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from esscher.runs.progress import cores


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
