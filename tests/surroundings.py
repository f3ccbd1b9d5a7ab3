"""What lies around a run and must stay as it is, and a clock that ends a test which waits for
ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

__all__ = ["ended_after", "surroundings", "tree_hash"]


class Waited(BaseException):
    """A command that waits; no Exception, so that nothing takes it for one of its own."""


@contextlib.contextmanager
def ended_after(seconds: int) -> Iterator[None]:
    """Raise where something waits for ever; far longer than anything takes, so no time is
    asserted.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise Waited(f"nothing came in {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def surroundings(folder: Path) -> None:
    """Files beside a run that a run has no business with."""
    (folder / "precious.txt").write_text("years of work\n", "utf-8")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".000001.parquet.17.abcd1234.tmp").write_bytes(b"not ours")
    (elsewhere / ".manifest.json.17.abcd1234.tmp").write_bytes(b"not ours either")
    (elsewhere / "000001.parquet").write_bytes(b"somebody's")
    (elsewhere / "loop").symlink_to("loop")


def tree_hash(folder: Path, *, but: str | None = None) -> str:
    """Hash of names, kinds, modes, links and contents of everything in a folder, except perhaps one
    entry of it.
    """
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if but is not None and path.relative_to(folder).parts[0] == but:
            continue
        about = path.lstat()
        found.update(f"{path.relative_to(folder)} {about.st_mode}\n".encode())
        if stat.S_ISLNK(about.st_mode):
            found.update(os.readlink(path).encode())
        elif stat.S_ISREG(about.st_mode):
            found.update(path.read_bytes())
    return found.hexdigest()
