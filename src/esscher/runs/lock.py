"""One writer per run: a lock file that names its holder, locked by flock, which ends with the
process. Also what the machine says of processes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from esscher.runs.errors import RunLocked, StoreError
from esscher.runs.files import descriptor_of, disk_error, read_json

_MOST_BYTES = 1 << 16
_NO_FLOCK = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}


def start_of(pid: int) -> str | None:
    """Seconds from the boot of the machine to the start of a process; None when it is gone.

    It tells a process from a later one of the same number. psutil gives both moments by the clock
    as it is set now, so their difference stays when the clock is set anew.
    """
    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return None
        return f"{process.create_time() - psutil.boot_time():.2f}"
    except psutil.NoSuchProcess:
        return None


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


@dataclass(frozen=True)
class Holder:
    """The process that writes a run. ``start`` tells it from a later process of the same number."""

    pid: int
    host: str
    start: str

    @classmethod
    def this_process(cls) -> Holder:
        return cls(os.getpid(), socket.gethostname(), start_of(os.getpid()) or "")

    def is_alive(self) -> bool | None:
        """None where it cannot be known: on another host, or where the system does not say."""
        if self.host != socket.gethostname():
            return None
        try:
            return start_of(self.pid) == self.start
        except psutil.AccessDenied:
            return None


def holder_of(path: Path) -> Holder | None:
    """The process that the lock file names; None when there is none, or none legible. Takes no
    lock.
    """
    try:
        named = read_json(path, _MOST_BYTES)
    except (OSError, ValueError):
        return None
    kinds = {name: type(value) for name, value in named.items()}
    if kinds != {"pid": int, "host": str, "start": str} or not 0 < named["pid"] < 2**31:
        return None
    return Holder(**named)


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the lock file, or raise RunLocked with the pid and host of its holder.

    A process that has the flock and finds a dead holder's name in the file puts its own there: two
    cannot both have it.
    """
    descriptor = _take(path)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(Holder.this_process())).encode(), 0)
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
    flags, created = os.O_RDWR | os.O_CREAT, True
    while True:
        try:
            try:
                descriptor = descriptor_of(path, flags | os.O_EXCL, follow=False)
            except FileExistsError:
                descriptor, created = descriptor_of(path, flags, follow=False), False
        except OSError as cause:
            raise disk_error(cause, path) from cause
        try:
            found = os.fstat(descriptor)
            if found.st_nlink > 1:
                raise StoreError(
                    f"{path}: the same file has another name elsewhere, which a lock has not;"
                    " remove it"
                )
            locked, holder = _lock(descriptor, path), holder_of(path)
            if (holder is None and not (locked or created)) or (
                holder is not None and holder.is_alive() is not False
            ):
                raise _refusal(path, holder)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(found, os.lstat(path)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> bool:
    """Whether the kernel locks the file for us; False on a file system without flock, where the
    name in the file is all there is.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as cause:
        raise _refusal(path, holder_of(path)) from cause
    except OSError as cause:
        if cause.errno in _NO_FLOCK:
            return False
        raise disk_error(cause, path) from cause
    return True


def _refusal(path: Path, holder: Holder | None) -> RunLocked:
    if holder is None:
        return RunLocked(
            f"{path.parent}: another process is just taking this run; if there is none, remove"
            f" {path}"
        )
    remedy = {
        None: f", and whether it lives cannot be seen from here; if it is gone, remove {path}",
        False: ": it died, but a process it started still holds the lock; end that one first",
        True: "; wait for it or stop it first",
    }
    who = f"{path.parent}: process {holder.pid} on host {holder.host} is writing this run"
    return RunLocked(who + remedy[holder.is_alive()])
