"""The files of a run directory, on a disk that others can write to: opened without waiting, read
within bounds, written whole or not at all; the lock of its one writer; shards and final tables.

pyarrow is imported when a table is read: listing runs and counting units needs the names alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import psutil

from esscher.runs.errors import NAME, Damaged, RunError, RunLocked, StoreError, resume_command

if TYPE_CHECKING:
    import pyarrow as pa

    from esscher.runs.tables import Shard

PAGE = "report.html"
JSON_BYTES = 1 << 28  # a manifest holds a record of every failure
_SHARD = re.compile(r"[0-9]{6}|[1-9][0-9]{6}")  # seven digits where six do not suffice
# temporary files of write_durable
_LEFT = re.compile(r"\.(manifest\.json|[a-z0-9_]+\.parquet)\.[0-9]+\.[0-9a-f]+\.tmp")
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


# ---- Reading and writing files.


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


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Inside, an OSError becomes a StoreError that says in words what the disk refused."""
    try:
        yield
    except OSError as cause:
        reason = _REFUSED.get(cause.errno or 0, cause.strerror or str(cause))
        raise StoreError(f"{path}: cannot be written: {reason}") from cause


def write_durable(path: Path, data: bytes) -> None:
    """Write a file so that it is on the disk, whole and under its name, when this returns.

    A temporary name in the same folder, fsync of the file, rename, fsync of the folder.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    with disk_errors(path):
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


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- One writer per run: a lock file that names its holder, locked by flock, which the kernel
# drops when the holder dies.


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
        with disk_errors(path):
            os.ftruncate(descriptor, 0)
            name = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
            os.pwrite(descriptor, name.encode(), 0)
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
        with contextlib.ExitStack() as stack, disk_errors(path):
            descriptor = descriptor_of(path, os.O_RDWR | os.O_CREAT, follow=False)
            stack.callback(os.close, descriptor)
            found = os.fstat(descriptor)
            if found.st_nlink > 1:
                raise StoreError(
                    f"{path}: the same file has another name elsewhere, which a lock has not;"
                    " remove it"
                )
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as cause:
                raise _refusal(path, "wait for it or stop it first; if there is none,") from cause
            holder = holder_of(path)
            if holder is not None and holder[1] != socket.gethostname():
                raise _refusal(path, "whether it lives cannot be seen from here; if it is gone,")
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(found, os.lstat(path)):
                    stack.pop_all()
                    return descriptor


def _refusal(path: Path, remedy: str) -> RunLocked:
    pid, host = holder_of(path) or ("?", "?")
    return RunLocked(
        f"{path.parent}: process {pid} on host {host} is writing this run; {remedy} remove {path}"
    )


# ---- Shards and final tables.


class Store:
    """Shards and final tables of one run. Any number of processes may write shards: equal units
    give equal bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shards = path / "shards"

    def create(self) -> None:
        """Make the folders, durably."""
        self.refuse_link()
        with disk_errors(self.path):
            for folder in (self.path, self.shards):
                folder.mkdir(parents=True, exist_ok=True)
                sync_folder(folder.parent)

    def refuse_link(self) -> None:
        """Refuse a symbolic link to the shards' folder: behind it are others' files."""
        if self.shards.is_symlink():
            raise RunError(
                f"{self.shards}: expected a folder, got a symbolic link, which is not followed;"
                " remove it"
            )

    def clean(self) -> None:
        """Remove the temporary files of killed writers; only for the holder of the lock."""
        with disk_errors(self.path):
            for file in (*self.path.iterdir(), *self.shards.iterdir()):
                if _LEFT.fullmatch(file.name) and stat.S_ISREG(os.lstat(file).st_mode):
                    file.unlink()

    def remove_page(self) -> None:
        """Remove the report: it will be out of date."""
        page = self.path / PAGE
        if page.is_file() and not page.is_symlink():
            with disk_errors(page):
                page.unlink(missing_ok=True)

    def shard_path(self, index: int) -> Path:
        return self.shards / f"{index:06d}.parquet"

    def indices(self, units: int | None = None) -> list[int]:
        """Units that have a shard, sound or not; those of the first ``units`` where told."""
        names = [name.removesuffix(".parquet") for name in self._names() if name[-8:] == ".parquet"]
        found = (int(name) for name in names if _SHARD.fullmatch(name))
        return sorted(index for index in found if units is None or index < units)

    def strays(self, units: int) -> list[Path]:
        """Files among the shards that are the shard of none of so many units."""
        own = {self.shard_path(index).name for index in self.indices(units)}
        return [self.shards / name for name in self._names() if name not in own and name[0] != "."]

    def count(self, units: int | None = None) -> int:
        """How many units have a shard."""
        return len(self.indices(units))

    def _names(self) -> list[str]:
        try:
            return [] if self.shards.is_symlink() else sorted(os.listdir(self.shards))
        except OSError:
            return []

    def write_shard(self, index: int, data: bytes) -> None:
        write_durable(self.shard_path(index), data)

    def remove_shard(self, index: int) -> None:
        """Remove a damaged shard; of a link the link."""
        path = self.shard_path(index)
        if path.is_dir() and not path.is_symlink():
            raise RunError(f"{path}: expected a file, got a folder; remove it")
        with disk_errors(path):
            path.unlink(missing_ok=True)

    def read_shard_header(self, index: int) -> dict[str, Any]:
        """The header of a shard whose checksum holds."""
        from esscher.runs.tables import read_shard_header

        path = self.shard_path(index)
        return read_shard_header(_bytes(path), str(path))

    def read_shard(self, index: int, spec_hash: str, unit: dict[str, Any] | None = None) -> Shard:
        """What a unit produced; Damaged where the shard is another unit's, or of another spec."""
        from esscher.runs.tables import Shard, decode_shard

        path = self.shard_path(index)
        header, tables = decode_shard(_bytes(path), str(path))
        if header["index"] != index or (unit is not None and header["unit"] != unit):
            raise Damaged(
                f"{path}: holds unit {header['index']} ({header['unit']}), not unit {index}"
            )
        if header["spec_hash"] != spec_hash:
            raise Damaged(
                f"{path}: belongs to another run; {resume_command(self.path)} computes its unit"
                " again"
            )
        return Shard(index, header["unit"], tables)

    def table_path(self, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r}: expected the name of a table: small letters, digits and _")
        return self.path / f"{name}.parquet"

    def write_table(self, name: str, table: pa.Table, header: Mapping[str, Any]) -> str:
        """Write a final table and return its checksum."""
        from esscher.runs.tables import checksum_of, encode_table

        data = encode_table(table, {**header, "table": name})
        write_durable(self.table_path(name), data)
        return checksum_of(data)

    def read_table(self, name: str, spec_hash: str, checksum: str | None = None) -> pa.Table:
        """A final table; Damaged where the file is another run's, another table, or not the one
        that was written.
        """
        from esscher.runs.tables import checksum_of, decode_table

        path = self.table_path(name)
        data = _bytes(path)
        header, table = decode_table(data, str(path))
        wrong = None
        if header.get("spec_hash") != spec_hash:
            wrong = "belongs to another run"
        elif header.get("table") != name:
            wrong = f"holds the table {header.get('table')!r}"
        elif checksum is not None and checksum_of(data) != checksum:
            wrong = "is not the table this run made"
        if wrong is not None:
            raise Damaged(f"{path}: {wrong}; {resume_command(self.path)} makes it anew")
        return table


class Shards(Sequence["Shard"]):
    """Shards of the units, in their order, read each time they are asked for: together they may
    not fit in memory.
    """

    def __init__(self, store: Store, units: Sequence[dict[str, Any]], spec_hash: str) -> None:
        self._store, self._units, self._spec_hash = store, units, spec_hash
        self._indices = store.indices(len(units))

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, place: int) -> Shard:  # type: ignore[override]
        index = self._indices[place]
        return self._store.read_shard(index, self._spec_hash, self._units[index])


def _bytes(path: Path) -> bytes:
    try:
        with open_regular(path, follow=False) as file:
            return file.read()
    except FileNotFoundError as cause:
        raise Damaged(f"{path}: missing") from cause
    except OSError as cause:
        raise Damaged(f"{path}: cannot be read: {cause.strerror or cause}") from cause
