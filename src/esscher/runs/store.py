"""Files of a run directory: written whole or not at all, by one writer at a time, checked when
they are read.

pyarrow is imported when a table is read: listing runs and counting units needs the names alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from esscher.runs.errors import Damaged, RunLocked, StoreError, resume_command

if TYPE_CHECKING:
    import pyarrow as pa

    from esscher.runs.tables import Shard

PAGE = "report.html"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ValueError for other content."""
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise ValueError(f"expected an object, got {type(content).__name__}")
    return content


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Inside, an OSError becomes a StoreError with the system's reason."""
    try:
        yield
    except OSError as cause:
        raise StoreError(f"{path}: cannot be written: {cause.strerror or cause}") from cause


def write_durable(path: Path, data: bytes) -> None:
    """Write a file so that it is on the disk, whole and under its name, when this returns.

    A temporary name in the same folder, fsync of the file, rename, fsync of the folder.
    """
    if path.exists() and not path.is_file():
        raise StoreError(f"{path}: cannot be written: expected the name of a file")
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
# drops when the holder dies. The file stays, empty, so that nobody locks one that is gone.


def holder_of(path: Path) -> tuple[int, str] | None:
    """Pid and host that a lock file names; None when there is none, or none legible."""
    try:
        named = read_json(path)
        return int(named["pid"]), str(named["host"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


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
    here, remedy = socket.gethostname(), None
    with contextlib.ExitStack() as stack:
        with disk_errors(path):
            file = stack.enter_context(open(path, "ab", buffering=0))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                remedy = "wait for it or stop it first; if there is none,"
            pid, host = holder_of(path) or ("?", here)
            if host != here:
                remedy = "whether it lives cannot be seen from here; if it is gone,"
            if remedy is not None:
                raise RunLocked(
                    f"{path.parent}: process {pid} on host {host} is writing this run; {remedy}"
                    f" remove {path}"
                )
            file.truncate(0)
            file.write(json.dumps({"pid": os.getpid(), "host": here}).encode())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                file.truncate(0)


# ---- Shards and final tables.


class Store:
    """Shards and final tables of one run; any number of processes may write shards."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shards = path / "shards"

    def create(self) -> None:
        """Make the folders, durably."""
        with disk_errors(self.path):
            for folder in (self.path, self.shards):
                folder.mkdir(parents=True, exist_ok=True)
                sync_folder(folder.parent)

    def clean(self) -> None:
        """Remove the temporary files of killed writers; only for the holder of the lock."""
        with disk_errors(self.path):
            for file in (*self.path.glob(".*.tmp"), *self.shards.glob(".*.tmp")):
                file.unlink()

    def shard_path(self, index: int) -> Path:
        return self.shards / f"{index:06d}.parquet"

    def indices(self, units: int | None = None) -> list[int]:
        """Units that have a shard, sound or not; those of the first ``units`` where told."""
        names = [file.stem for file in self.shards.glob("[0-9]*.parquet")]
        found = [int(name) for name in names if name.isdecimal() and f"{int(name):06d}" == name]
        return sorted(index for index in found if units is None or index < units)

    def count(self, units: int | None = None) -> int:
        """How many units have a shard."""
        return len(self.indices(units))

    def read_shard(self, index: int, spec_hash: str) -> Shard:
        """What a unit produced; Damaged where the shard is another unit's, or of another spec."""
        from esscher.runs.tables import Shard, decode_shard

        path = self.shard_path(index)
        header, tables = decode_shard(_bytes(path), str(path))
        if (header["index"], header["spec_hash"]) != (index, spec_hash):
            raise Damaged(f"{path}: damaged: belongs to another unit or run")
        return Shard(index, header["unit"], tables)

    def write_table(self, name: str, table: pa.Table, header: Mapping[str, Any]) -> str:
        """Write a final table and return its checksum."""
        from esscher.runs.tables import checksum_of, encode_table

        data = encode_table(table, {**header, "table": name})
        write_durable(self.path / f"{name}.parquet", data)
        return checksum_of(data)

    def read_table(self, name: str, checksum: str) -> pa.Table:
        """A final table; Damaged where the file is not the one that was written."""
        from esscher.runs.tables import checksum_of, decode_table

        path = self.path / f"{name}.parquet"
        data = _bytes(path)
        _, table = decode_table(data, str(path))
        if checksum_of(data) != checksum:
            raise Damaged(
                f"{path}: is not the table this run made; {resume_command(self.path)} makes it anew"
            )
        return table


class Shards(Sequence["Shard"]):
    """Shards in the order of units, read each time: together they may not fit in memory."""

    def __init__(self, store: Store, units: int, spec_hash: str) -> None:
        self._store, self._spec_hash = store, spec_hash
        self._indices = store.indices(units)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, place: int) -> Shard:  # type: ignore[override]
        return self._store.read_shard(self._indices[place], self._spec_hash)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as cause:
        raise Damaged(f"{path}: cannot be read: {cause.strerror or cause}") from cause
