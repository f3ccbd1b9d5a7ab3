"""One writer per run: a lock file that names its holder, locked by flock, which the kernel drops
when the holder dies. Also what the machine says of processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from esscher.runs.errors import RunLocked, StoreError
from esscher.runs.files import descriptor_of, disk_error, read_json


def memory_of(pids: Iterable[int] = ()) -> int:
    """Resident memory now, in bytes, of this process and of those that are still there."""
    total = 0
    for pid in (os.getpid(), *pids):
        with contextlib.suppress(psutil.Error):
            total += psutil.Process(pid).memory_info().rss
    return total


def cores() -> int:
    """Number of cores this process may use."""
    if hasattr(psutil.Process, "cpu_affinity"):  # macOS binds no process to cores
        return len(psutil.Process().cpu_affinity())
    return psutil.cpu_count() or 1


def holder_of(path: Path) -> tuple[int, str] | None:
    """Pid and host that a lock file names; None when there is none, or none legible."""
    try:
        named = read_json(path, 1 << 16)
    except (OSError, ValueError):
        return None
    pid, host = named.get("pid"), named.get("host")
    if not isinstance(pid, int) or not 0 < pid < 2**31 or not isinstance(host, str):
        return None
    return pid, host


def is_held(path: Path) -> bool:
    """Whether a lock file names a living process; one on another host is taken for alive."""
    holder = holder_of(path)
    return holder is not None and (
        holder[1] != socket.gethostname() or psutil.pid_exists(holder[0])
    )


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the lock file, or raise RunLocked with the pid and host of its holder.

    A dead holder has no flock, and its file is taken over. A file that names another host is
    refused, since flock may not reach there.
    """
    descriptor = _take(path)
    try:
        os.ftruncate(descriptor, 0)
        name = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
        os.pwrite(descriptor, name.encode(), 0)
    except OSError as cause:
        os.close(descriptor)
        raise disk_error(cause, path) from cause
    try:
        yield
    finally:
        # Removed while still locked: a process that opened the old file sees that its name is gone
        # and starts over.
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _take(path: Path) -> int:
    """A descriptor of the lock file, which is ours now."""
    while True:
        try:
            descriptor = descriptor_of(path, os.O_RDWR | os.O_CREAT, follow=False)
        except OSError as cause:
            raise disk_error(cause, path) from cause
        try:
            found = os.fstat(descriptor)
            if found.st_nlink > 1:
                raise StoreError(
                    f"{path}: the same file has another name elsewhere, which a lock has not;"
                    " remove it"
                )
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            holder = holder_of(path)
            if holder is not None and holder[1] != socket.gethostname():
                raise _refusal(path, "whether it lives cannot be seen from here; if it is gone,")
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(found, os.lstat(path)):
                    return descriptor
        except BlockingIOError as cause:
            os.close(descriptor)
            raise _refusal(path, "wait for it or stop it first; if there is none,") from cause
        except OSError as cause:
            os.close(descriptor)
            raise disk_error(cause, path) from cause
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _refusal(path: Path, remedy: str) -> RunLocked:
    pid, host = holder_of(path) or ("?", "?")
    return RunLocked(
        f"{path.parent}: process {pid} on host {host} is writing this run; {remedy} remove {path}"
    )
