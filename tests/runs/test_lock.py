"""One writer: the living keep their lock, the dead lose it, and only one of many takes it over."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from esscher.runs import RunLocked
from esscher.runs.store import held, holder_of, is_held


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "lock"


HERE = (os.getpid(), socket.gethostname())


def name(lock: Path, pid: int, host: str) -> None:
    lock.write_text(json.dumps({"pid": pid, "host": host}), "utf-8")


def test_the_file_names_its_holder_while_there_is_one(lock: Path) -> None:
    with held(lock):
        assert holder_of(lock) == HERE
        assert is_held(lock)
        with (
            pytest.raises(RunLocked, match=f"process {HERE[0]} on host {HERE[1]} is writing"),
            held(lock),
        ):
            pytest.fail("two writers")
        assert holder_of(lock) == HERE
    assert not is_held(lock)
    with held(lock):
        pass


def test_an_exception_frees_it(lock: Path) -> None:
    with pytest.raises(ArithmeticError), held(lock):
        raise ArithmeticError
    with held(lock):
        pass


def test_a_dead_process_is_taken_over(lock: Path) -> None:
    """Also when its number is in use again, as that of this process is."""
    ended = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
    ended.wait()
    name(lock, ended.pid, socket.gethostname())
    assert not is_held(lock)
    for pid in (ended.pid, os.getpid()):
        name(lock, pid, socket.gethostname())
        with held(lock):
            assert holder_of(lock) == HERE


def test_another_host_is_refused_and_told_how_to_force(lock: Path) -> None:
    name(lock, 17, "elsewhere")
    assert is_held(lock)
    with (
        pytest.raises(
            RunLocked, match=rf"process 17 on host elsewhere .* if it is gone, remove {lock}"
        ),
        held(lock),
    ):
        pytest.fail("two writers")
    lock.unlink()
    with held(lock):
        pass


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff"])
def test_an_illegible_file_that_nobody_locks_is_taken(content: bytes, lock: Path) -> None:
    lock.write_bytes(content)
    with held(lock):
        assert holder_of(lock) == HERE


def test_one_of_many_takes_it_over(lock: Path) -> None:
    """Thirty-two at once find a dead holder's lock, fifty times: one has it, the others are
    refused.
    """
    for _ in range(50):
        name(lock, os.getpid(), socket.gethostname())
        barrier, have = threading.Barrier(32), []
        all_tried = threading.Barrier(32)

        def take(
            barrier: threading.Barrier, all_tried: threading.Barrier, have: list[bool]
        ) -> None:
            barrier.wait()
            try:
                with held(lock):
                    have.append(True)
                    all_tried.wait()
            except RunLocked:
                have.append(False)
                all_tried.wait()

        threads = [
            threading.Thread(target=take, args=(barrier, all_tried, have)) for _ in range(32)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(have) == [False] * 31 + [True]


def test_it_changes_hands_without_ever_having_two_holders(lock: Path) -> None:
    """Eight threads take it and give it back as fast as they can."""
    inside, most, taken = [], [], []

    def work() -> None:
        for _ in range(300):
            try:
                with held(lock):
                    inside.append(1)
                    time.sleep(0.0003)
                    most.append(len(inside))
                    taken.append(1)
                    inside.pop()
            except RunLocked:
                continue

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(taken) > 8
    assert holder_of(lock) is None
