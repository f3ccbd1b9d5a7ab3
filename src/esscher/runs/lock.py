"""One writer per run. The lock file names its holder; the kernel drops the lock on it when the
holder dies.

The lock is flock, which Linux and macOS have. The package filelock takes the same flock, but opens
the file in its own way: it takes one that has a second name elsewhere, and leaves the file behind,
so that a reader of the name is misled.
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
from esscher.runs.files import descriptor_of, read_json
from esscher.runs.store import disk_error


def start_of(pid: int) -> str | None:
    """Seconds from the boot of the machine to the start of a process, to the hundredth; None when
    it is gone.

    On Linux psutil 7.2 gives both moments by the clock as it is set now, so their difference stays
    when the clock is set anew (unless between the two readings). It tells a process from a later
    one of the same number. After a reboot one of the same number and the same hundredth of a second
    would pass for it.
    """
    try:
        process = psutil.Process(pid)
        # dead, only not yet collected by its parent
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return None
        return f"{process.create_time() - psutil.boot_time():.2f}"
    except psutil.NoSuchProcess:
        return None


def memory_of(pids: Iterable[int] = ()) -> int:
    """Resident memory now, in bytes, of this process and of those that are still there."""
    total = 0
    for pid in (os.getpid(), *pids):
        try:
            total += psutil.Process(pid).memory_info().rss
        except psutil.Error:
            continue
    return total


def cores() -> int:
    """How many cores this process may use: those it is bound to, where the system binds processes
    (macOS does not).
    """
    if hasattr(psutil.Process, "cpu_affinity"):
        return len(psutil.Process().cpu_affinity())
    return psutil.cpu_count() or 1


# ---- One writer per run. The lock file names its holder; the kernel drops the lock on it when
# the holder dies.

_MOST_BYTES = 1 << 16
_NO_FLOCK = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}


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
        """None where it cannot be known: on another host, or where the system tells nothing of
        others' processes.
        """
        if self.host != socket.gethostname():
            return None
        try:
            return start_of(self.pid) == self.start
        except psutil.AccessDenied:
            return None


def holder_of(path: Path) -> Holder | None:
    """Who the lock file names; None when nobody, or nobody legible. Takes no lock and disturbs no
    writer.
    """
    try:
        named = read_json(path, _MOST_BYTES)
    except (OSError, ValueError):
        return None
    kinds = {"pid": int, "host": str, "start": str}
    if named.keys() != kinds.keys() or any(
        type(named[field]) is not kind for field, kind in kinds.items()
    ):
        return None
    return Holder(**named) if 0 < named["pid"] < 2**31 else None


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the lock file, or raise RunLocked with the pid and host of who does.

    The file is made with O_EXCL or opened as it is, then locked by flock, which ends with the
    process. Whoever has the flock and finds a dead holder's name in the file puts its own there:
    two takers cannot both have it.
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
    while True:
        descriptor, created = _open(path)
        try:
            locked = _lock(descriptor, path)
            holder = holder_of(path)
            if holder is None and not (locked or created):
                raise _refusal(path, None)
            if holder is not None and holder.is_alive() is not False:
                raise _refusal(path, holder)
            if _is_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _open(path: Path) -> tuple[int, bool]:
    """A descriptor of the file, and whether this call made it."""
    try:
        with contextlib.suppress(FileExistsError):
            return descriptor_of(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, follow=False), True
        descriptor = descriptor_of(path, os.O_RDWR | os.O_CREAT, follow=False)
    except OSError as cause:
        raise disk_error(cause, path) from cause
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise StoreError(
            f"{path}: the same file has another name elsewhere, which a lock has not; remove it"
        )
    return descriptor, False


def _lock(descriptor: int, path: Path) -> bool:
    """Whether the kernel locks it for us; False on a file system without flock: then the name in it
    is all there is.
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


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _refusal(path: Path, holder: Holder | None) -> RunLocked:
    if holder is None:
        return RunLocked(
            f"{path.parent}: another process is just taking this run; if there is none, remove"
            f" {path}"
        )
    who = f"{path.parent}: process {holder.pid} on host {holder.host} is writing this run"
    if holder.is_alive() is None:
        return RunLocked(
            f"{who}, and whether it lives cannot be seen from here; if it is gone, remove {path}"
        )
    if not holder.is_alive():
        return RunLocked(
            f"{who}: it died, but a process it started still holds the lock; end that one first"
        )
    return RunLocked(f"{who}; wait for it or stop it first")
