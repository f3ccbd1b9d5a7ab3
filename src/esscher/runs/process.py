"""What this machine says of its processes, by psutil: when one started, the memory some have, the
cores this one may use.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import psutil

__all__ = ["cores", "memory_of", "start_of"]


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
