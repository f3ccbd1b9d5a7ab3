"""Files as a disk may hold them, which others can write to: opened without waiting, read within
bounds.

A pipe, a device or a folder in the place of a file is an OSError that says so; so is, among a run's
own files, a symbolic link: a run's files are its own.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

import yaml

YAML_BYTES = 1 << 22  # a spec is read at about a megabyte in ten seconds
JSON_BYTES = 1 << 28  # a manifest holds a record of every failure
_KINDS = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def kind_of(mode: int) -> str:
    """What a file's mode says it is, in words."""
    return next((word for is_kind, word in _KINDS if is_kind(mode)), "no file")


def descriptor_of(path: str | os.PathLike[str], flags: int, *, follow: bool) -> int:
    """A descriptor of a regular file; O_NONBLOCK, so that a pipe without a writer is refused and
    not waited for.
    """
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as cause:
        if cause.errno == errno.ELOOP and not follow:
            raise OSError(
                errno.ELOOP, "is a symbolic link, which is not followed", str(path)
            ) from cause
        if cause.errno == errno.ENXIO:  # a socket, or a pipe that nobody reads
            raise OSError(
                errno.ENXIO, f"expected a file, got {kind_of(os.stat(path).st_mode)}", str(path)
            ) from cause
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"expected a file, got {kind_of(mode)}", str(path))
    return descriptor


def open_regular(path: str | os.PathLike[str], *, follow: bool = True) -> BinaryIO:
    """A file to read; links to files are followed unless told."""
    return os.fdopen(descriptor_of(path, os.O_RDONLY, follow=follow), "rb")


def read_own(path: Path, most: int | None = None) -> bytes:
    """The bytes of a file of a run, ``most`` at most."""
    with open_regular(path, follow=False) as file:
        return _read(file, path, most)


def _read(file: BinaryIO, path: str | os.PathLike[str], most: int | None) -> bytes:
    data = file.read(-1 if most is None else most + 1) or b""
    if most is not None and len(data) > most:
        raise OSError(errno.EFBIG, f"expected at most {most} bytes, got more", str(path))
    return data


def json_object(data: bytes | str) -> dict[str, Any]:
    """A JSON object; ValueError for anything else, however deep it is nested."""
    try:
        content = json.loads(data, parse_constant=_refuse_constant)
    except RecursionError as cause:
        raise ValueError("nested too deeply") from cause
    if not isinstance(content, dict):
        raise ValueError(f"expected an object, got {type(content).__name__}")
    return content


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"expected a number, got {name}")


def read_json(path: Path, most: int = JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file of a run. ValueError for other content, OSError for what cannot be
    read.
    """
    return json_object(read_own(path, most))


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Plain values; an alias is refused, since a few lines of them stand for more values than any
    memory holds.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases such as *name are not read; write the value out")
        return super().compose_node(parent, index)


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """The content of a YAML file, or a ValueError of one line."""
    try:
        with open_regular(path) as file:
            text = _read(file, path, YAML_BYTES).decode("utf-8")
        return yaml.load(text, Loader=_Loader)
    except FileNotFoundError as cause:
        raise ValueError(f"{path}: no such file; give a YAML file or flags") from cause
    except OSError as cause:
        raise ValueError(f"{path}: cannot be read: {cause.strerror or cause}") from cause
    except RecursionError as cause:
        raise ValueError(f"{path}: not YAML: nested too deeply") from cause
    # a date or a number that cannot be is a ValueError
    except (yaml.YAMLError, ValueError, OverflowError) as cause:
        raise ValueError(f"{path}: not YAML: {' '.join(str(cause).split())}") from cause


def check_output(path: Path) -> None:
    """Refuse to write where something other than a file is: a device, a pipe, a folder."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path}: expected the name of a file to write, got {kind_of(mode)}")


# ---- The formats of exported tables, by name; named without what writes them.

ENDINGS = {"csv": ".csv", "json": ".json", "parquet": ".parquet", "netcdf": ".nc"}
