"""Fixtures of run tests: a driver of processes, an undisturbed run to compare with, small disks."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from esscher.runs import Run, execute
from tests.runs.driver import Driver, driving
from tests.runs.job import WalkSpec


@pytest.fixture(scope="session")
def driver() -> Iterator[Driver]:
    """A process that starts others."""
    with driving() as started:
        yield started


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a loaded disk takes long over each of a thousand
    fsyncs.
    """
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as made:
        yield Path(made)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[WalkSpec], dict[str, bytes]]:
    """Bytes of the final tables of a spec, from one run in this process that nothing disturbs."""
    known: dict[str, dict[str, bytes]] = {}

    def tables(spec: WalkSpec) -> dict[str, bytes]:
        if spec.hash not in known:
            known[spec.hash] = table_bytes(
                execute(spec, tmp_path_factory.mktemp("undisturbed") / "run")
            )
        return known[spec.hash]

    return tables


def table_bytes(run: Run) -> dict[str, bytes]:
    assert run.status == "complete"
    return {name: (run.path / f"{name}.parquet").read_bytes() for name in run.tables}


@pytest.fixture
def same_tables(undisturbed: Callable[[WalkSpec], dict[str, bytes]]) -> Callable[[Run], bool]:
    """Whether a run's final tables are, byte for byte, those of an undisturbed run."""

    def same(run: Run) -> bool:
        expected = undisturbed(WalkSpec.read(run.spec))
        return set(expected) == {"ends", "points"} and table_bytes(run) == expected

    return same


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A small file system: called with options it is mounted, called again it is mounted anew, with
    its content.
    """
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = []

    def mount(options: str) -> Path:
        if os.geteuid() != 0:
            pytest.skip("mounting a small disk needs root")
        remount = (
            ["-o", f"remount,{options}"] if mounted else ["-t", "tmpfs", "-o", options, "tmpfs"]
        )
        answer = subprocess.run(
            ["mount", *remount, str(folder)], capture_output=True, text=True, check=False
        )
        if answer.returncode and not mounted:
            pytest.skip(f"this machine lets nobody mount: {answer.stderr.strip()}")
        assert answer.returncode == 0, answer.stderr
        mounted.append(options)
        return folder

    yield mount
    if mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
