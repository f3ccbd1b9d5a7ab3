"""The files of a run directory. A file is there whole or not at all, whenever the power goes."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import pyarrow as pa

from esscher.runs.errors import Damaged, StoreError, resume_command
from esscher.runs.spec import Unit
from esscher.runs.tables import NAME, Shard, decode_shard, decode_table, encode_table, read_header

__all__ = ["Shards", "Store", "write_durable"]

_SETTLE_SECONDS = 1.0
_REFUSED = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
}


def write_durable(path: Path, data: bytes, *, settle: bool = True) -> None:
    """Write a file so that it is on the disk, whole and under its name, when this returns.

    A temporary name in the same folder, fsync of the file, rename, fsync of the folder. Without the last
    (``settle=False``) a loss of power may take the file back, whole; the end of a process never does.
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
        if settle:
            sync_folder(path.parent)
    except OSError as cause:
        raise disk_error(cause, path) from cause


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_error(cause: OSError, path: Path) -> StoreError:
    """What the disk refused, in words."""
    return StoreError(f"{path}: cannot be written: {_REFUSED.get(cause.errno or 0, cause.strerror or str(cause))}")


class Store:
    """Shards and final tables of one run. Any number of processes may write shards: equal units give equal bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shards = path / "shards"
        self._settled = 0.0

    def create(self) -> None:
        """The folders, durable."""
        try:
            for folder in (self.path, self.shards):
                folder.mkdir(parents=True, exist_ok=True)
                sync_folder(folder.parent)
        except OSError as cause:
            raise disk_error(cause, self.path) from cause

    def sweep(self) -> None:
        """Remove what killed writers left unfinished; only for who holds the lock."""
        try:
            for folder in (self.path, self.shards):
                for left in folder.glob(".*.tmp"):
                    left.unlink(missing_ok=True)
        except OSError as cause:
            raise disk_error(cause, self.path) from cause

    def shard_path(self, index: int) -> Path:
        return self.shards / f"{index:06d}.parquet"

    def indices(self) -> list[int]:
        """Units that have a shard, sound or not."""
        return sorted(int(path.stem) for path in self.shards.glob("*.parquet") if path.stem.isdecimal())

    def count(self) -> int:
        try:
            return sum(entry.name.endswith(".parquet") and entry.name[0] != "." for entry in os.scandir(self.shards))
        except OSError:
            return 0

    def write_shard(self, index: int, data: bytes) -> None:
        """Store a shard. Names are flushed once a second: what a loss of power takes back is computed again."""
        settle = time.monotonic() - self._settled > _SETTLE_SECONDS
        write_durable(self.shard_path(index), data, settle=settle)
        if settle:
            self._settled = time.monotonic()

    def settle(self) -> None:
        """Flush the names of all shards, whichever process wrote them."""
        try:
            sync_folder(self.shards)
        except OSError as cause:
            raise disk_error(cause, self.shards) from cause

    def remove_shard(self, index: int) -> None:
        try:
            self.shard_path(index).unlink(missing_ok=True)
        except OSError as cause:
            raise disk_error(cause, self.shard_path(index)) from cause

    def read_shard_header(self, index: int) -> dict[str, Any]:
        path = self.shard_path(index)
        return read_header(_bytes(path), str(path))

    def read_shard(self, index: int, unit: Unit | None = None) -> Shard:
        path = self.shard_path(index)
        header, tables = decode_shard(_bytes(path), str(path))
        if header["index"] != index or (unit is not None and header["unit"] != unit):
            raise Damaged(f"{path}: holds unit {header['index']} ({header['unit']}), not unit {index}")
        return Shard(index, header["unit"], tables)

    def stored(self, units: list[Unit]) -> Shards:
        """What the units produced, those that are there, in their order."""
        return Shards(self, [(index, unit) for index, unit in enumerate(units) if self.shard_path(index).exists()])

    def table_path(self, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r}: expected the name of a table: small letters, digits and _")
        return self.path / f"{name}.parquet"

    def write_table(self, name: str, table: pa.Table, header: Mapping[str, Any]) -> None:
        write_durable(self.table_path(name), encode_table(table, {**header, "table": name}))

    def read_table(self, name: str, spec_hash: str) -> pa.Table:
        path = self.table_path(name)
        header, table = decode_table(_bytes(path), str(path))
        if header.get("spec_hash") != spec_hash:
            raise Damaged(f"{path}: belongs to another run; {resume_command(self.path)} makes it anew")
        return table


class Shards(Sequence[Shard]):
    """Shards read when they are asked for, each time anew: a job may hold more in them than fits in memory."""

    def __init__(self, store: Store, known: list[tuple[int, Unit]]) -> None:
        self._store, self._known = store, known

    def __len__(self) -> int:
        return len(self._known)

    @overload
    def __getitem__(self, place: int) -> Shard: ...

    @overload
    def __getitem__(self, place: slice) -> Shards: ...

    def __getitem__(self, place: int | slice) -> Shard | Shards:
        if isinstance(place, slice):
            return Shards(self._store, self._known[place])
        return self._store.read_shard(*self._known[place])


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as cause:
        raise Damaged(f"{path}: missing") from cause
    except OSError as cause:
        raise Damaged(f"{path}: cannot be read: {cause.strerror or cause}") from cause
