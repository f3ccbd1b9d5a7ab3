"""Files on a disk that others can write to: opened without waiting, read within bounds, written
whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any, BinaryIO

from esscher.runs.errors import StoreError

JSON_BYTES = 1 << 28  # a manifest holds a record of every failure
ENDINGS = {"csv": ".csv", "json": ".json", "parquet": ".parquet", "netcdf": ".nc"}
"""Formats of exported tables and the ends of their files' names."""
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_REFUSED = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
}


def kind_of(mode: int) -> str:
    """What a file's mode says it is, in words."""
    return _KINDS.get(stat.S_IFMT(mode), "no file")


def descriptor_of(path: str | os.PathLike[str], flags: int, *, follow: bool) -> int:
    """A descriptor of a regular file; anything else (a pipe, a device, with ``follow=False`` a
    symbolic link) is an OSError that says what it is, and is not waited for.
    """
    with contextlib.suppress(FileNotFoundError):
        mode = os.stat(path, follow_symlinks=follow).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"expected a file, got {kind_of(mode)}", str(path))
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    return os.open(path, flags, 0o644)


def open_regular(path: str | os.PathLike[str], *, follow: bool = True) -> BinaryIO:
    """A regular file to read; links to files are followed unless told."""
    return os.fdopen(descriptor_of(path, os.O_RDONLY, follow=follow), "rb")


def read_bytes(file: BinaryIO, path: str | os.PathLike[str], most: int) -> bytes:
    """All bytes of an open file; more than ``most`` are an OSError."""
    data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"expected at most {most} bytes, got more", str(path))
    return data


def json_object(data: bytes | str) -> dict[str, Any]:
    """A JSON object; ValueError for anything else, however deep it is nested."""

    def refuse(name: str) -> Any:
        raise ValueError(f"expected a number, got {name}")

    try:
        content = json.loads(data, parse_constant=refuse)
    except RecursionError as cause:
        raise ValueError("nested too deeply") from cause
    if not isinstance(content, dict):
        raise ValueError(f"expected an object, got {type(content).__name__}")
    return content


def read_json(path: Path, most: int = JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file of a run. ValueError for other content, OSError for what cannot be
    read.
    """
    with open_regular(path, follow=False) as file:
        return json_object(read_bytes(file, path, most))


def check_output(path: Path) -> None:
    """Refuse to write where something other than a file is: a device, a pipe, a folder."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise ValueError(f"{path}: expected the name of a file to write, got {kind_of(mode)}")


def write_durable(path: Path, data: bytes) -> None:
    """Write a file so that it is on the disk, whole and under its name, when this returns.

    A temporary name in the same folder, fsync of the file, rename, fsync of the folder.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as cause:
        raise disk_error(cause, path) from cause


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_error(cause: OSError, path: Path) -> StoreError:
    """What the disk refused, in words."""
    reason = _REFUSED.get(cause.errno or 0, cause.strerror or str(cause))
    return StoreError(f"{path}: cannot be written: {reason}")
