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

import psutil
import pytest

from esscher.runs import RunLocked
from esscher.runs.lock import Holder, held, holder_of, start_of


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def name(lock: Path, pid: int, host: str, start: str) -> None:
    lock.write_text(json.dumps({"pid": pid, "host": host, "start": start}), "utf-8")


def test_the_file_names_its_holder_and_goes_with_it(lock: Path) -> None:
    with held(lock):
        assert holder_of(lock) == Holder(
            os.getpid(), socket.gethostname(), start_of(os.getpid()) or ""
        )
        with (
            pytest.raises(
                RunLocked, match=f"process {os.getpid()} on host {socket.gethostname()} is writing"
            ),
            held(lock),
        ):
            pytest.fail("two writers")
        assert holder_of(lock) == Holder.this_process()
    assert not lock.exists()
    with held(lock):
        pass


def test_an_exception_frees_it(lock: Path) -> None:
    with pytest.raises(ArithmeticError), held(lock):
        raise ArithmeticError
    with held(lock):
        pass


def test_a_dead_process_is_taken_over(lock: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
    start = start_of(ended.pid)
    assert start is not None
    ended.wait()
    name(lock, ended.pid, socket.gethostname(), start)
    with held(lock):
        assert holder_of(lock) == Holder.this_process()


def test_a_process_nobody_collected_is_dead(lock: Path) -> None:
    zombie = subprocess.Popen([sys.executable, "-S", "-c", "pass"], stdout=subprocess.PIPE)
    start = start_of(zombie.pid)
    assert zombie.stdout is not None
    zombie.stdout.read()  # its output ends when it does
    while psutil.Process(zombie.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    name(lock, zombie.pid, socket.gethostname(), start or "")
    with held(lock):
        pass
    zombie.wait()
    zombie.stdout.close()


def test_a_number_used_again_is_another_process(lock: Path) -> None:
    """This process lives, but it is not the one that started at another time."""
    name(lock, os.getpid(), socket.gethostname(), "another boot:1")
    with held(lock):
        assert holder_of(lock) == Holder.this_process()


def test_a_living_process_keeps_it_even_where_the_kernel_does_not_lock(lock: Path) -> None:
    name(lock, os.getpid(), socket.gethostname(), start_of(os.getpid()) or "")
    with pytest.raises(RunLocked, match=f"process {os.getpid()}"), held(lock):
        pytest.fail("two writers")


def test_another_host_is_refused_and_told_how_to_force(lock: Path) -> None:
    name(lock, 17, "elsewhere", "a:1")
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
        assert holder_of(lock) == Holder.this_process()


def test_one_of_many_takes_it_over(lock: Path) -> None:
    """Thirty-two at once find a dead holder's lock, fifty times: one has it, the others are
    refused.
    """
    for _ in range(50):
        name(lock, os.getpid(), socket.gethostname(), "another boot:1")
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
    """Eight threads take it and give it back as fast as they can; a file just removed must not be
    mistaken for it.
    """
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
    assert not lock.exists()
