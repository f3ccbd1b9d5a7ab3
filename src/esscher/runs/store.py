"""The files of a run directory. A file is there whole or not at all, whenever the power goes.

What reads Parquet is imported when a file is read: to list runs and to count their units takes the
names alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from esscher.runs.errors import NAME, Damaged, RunError, StoreError, resume_command
from esscher.runs.files import read_own
from esscher.runs.spec import Unit

if TYPE_CHECKING:
    import pyarrow as pa

    from esscher.runs.tables import Shard

PAGE = "report.html"
_SHARD = re.compile(r"([0-9]{6,7})\.parquet")
# as write_durable names it
_LEFT = re.compile(r"\.(manifest\.json|[a-z0-9_]+\.parquet)\.[0-9]+\.[0-9a-f]+\.tmp")
_SETTLE_SECONDS = 1.0
_REFUSED = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
}


def write_durable(path: Path, data: bytes, *, settle: bool = True) -> None:
    """Write a file so that it is on the disk, whole and under its name, when this returns.

    A temporary name in the same folder, fsync of the file, rename, fsync of the folder. Without the
    last (``settle=False``) a loss of power may take the file back, whole; the end of a process
    never does.
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
    return StoreError(
        f"{path}: cannot be written: {_REFUSED.get(cause.errno or 0, cause.strerror or str(cause))}"
    )


class Store:
    """Shards and final tables of one run. Any number of processes may write shards: equal units
    give equal bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shards = path / "shards"
        self._settled = 0.0

    def create(self) -> None:
        """The folders, durable."""
        self.refuse_link()
        try:
            for folder in (self.path, self.shards):
                folder.mkdir(parents=True, exist_ok=True)
                sync_folder(folder.parent)
        except OSError as cause:
            raise disk_error(cause, self.path) from cause

    def refuse_link(self) -> None:
        """A run's shards are in its own folder: behind a link are somebody else's files."""
        if self.shards.is_symlink():
            raise RunError(
                f"{self.shards}: expected a folder, got a symbolic link, which is not followed;"
                " remove it"
            )

    def sweep(self) -> None:
        """Remove what killed writers left unfinished; only for who holds the lock. What others put
        there stays.
        """
        try:
            for folder in (self.path, self.shards):
                for left in _entries(folder):
                    if _LEFT.fullmatch(left.name) and left.is_file(follow_symlinks=False):
                        Path(left.path).unlink(missing_ok=True)
        except OSError as cause:
            raise disk_error(cause, self.path) from cause

    def shard_path(self, index: int) -> Path:
        return self.shards / f"{index:06d}.parquet"

    def indices(self, units: int | None = None) -> list[int]:
        """Units that have a shard, sound or not; those of a plan of so many units where it is
        known.
        """
        found = (index_of(entry.name) for entry in self._shard_entries())
        return sorted(
            index for index in found if index is not None and (units is None or index < units)
        )

    def strays(self, units: int) -> list[Path]:
        """What is among the shards and bears the name of none of so many units."""
        own = {self.shard_path(index).name for index in self.indices(units)}
        names = (entry.name for entry in self._shard_entries())
        return [self.shards / name for name in sorted(names) if name not in own and name[0] != "."]

    def count(self, units: int | None = None) -> int:
        """How many units have a shard."""
        return len(self.indices(units))

    def _shard_entries(self) -> list[os.DirEntry[str]]:
        if self.shards.is_symlink():
            return []
        try:
            return _entries(self.shards)
        except OSError:
            return []

    def write_shard(self, index: int, data: bytes) -> None:
        """Store a shard. Names are flushed once a second: what a loss of power takes back is
        computed again.
        """
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
        """Remove a damaged shard; of a link the link."""
        path = self.shard_path(index)
        if path.is_dir() and not path.is_symlink():
            raise RunError(f"{path}: expected a file, got a folder; remove it")
        try:
            path.unlink(missing_ok=True)
        except OSError as cause:
            raise disk_error(cause, path) from cause

    def remove_page(self) -> None:
        """Remove the report: what it shows is no longer what the run will hold."""
        page = self.path / PAGE
        if page.is_file() and not page.is_symlink():
            try:
                page.unlink(missing_ok=True)
            except OSError as cause:
                raise disk_error(cause, page) from cause

    def read_shard_header(self, index: int) -> dict[str, Any]:
        from esscher.runs.tables import read_shard_header

        path = self.shard_path(index)
        return _checked(read_shard_header(_bytes(path), str(path)), path)

    def read_shard(
        self, index: int, unit: Unit | None = None, spec_hash: str | None = None
    ) -> Shard:
        """What a unit produced; Damaged where the shard is another unit's, or of another spec."""
        from esscher.runs.tables import Shard, decode_shard

        path = self.shard_path(index)
        header, tables = decode_shard(_bytes(path), str(path))
        _checked(header, path)
        if header["index"] != index or (unit is not None and header["unit"] != unit):
            raise Damaged(
                f"{path}: holds unit {header['index']} ({header['unit']}), not unit {index}"
            )
        if spec_hash is not None and header["spec_hash"] != spec_hash:
            raise Damaged(
                f"{path}: belongs to another run; {resume_command(self.path)} computes its unit"
                " again"
            )
        return Shard(index, header["unit"], tables)

    def stored(self, units: list[Unit], spec_hash: str) -> Shards:
        """What the units produced, those that are there, in their order."""
        return Shards(
            self, [(index, units[index], spec_hash) for index in self.indices(len(units))]
        )

    def table_path(self, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r}: expected the name of a table: small letters, digits and _")
        return self.path / f"{name}.parquet"

    def write_table(self, name: str, table: pa.Table, header: Mapping[str, Any]) -> str:
        """Store a final table and return its checksum."""
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
        wrong = (
            "belongs to another run"
            if header.get("spec_hash") != spec_hash
            else (
                f"holds the table {header.get('table')!r}"
                if header.get("table") != name
                else (
                    "is not the table this run made"
                    if checksum is not None and checksum_of(data) != checksum
                    else None
                )
            )
        )
        if wrong is not None:
            raise Damaged(f"{path}: {wrong}; {resume_command(self.path)} makes it anew")
        return table


class Shards(Sequence["Shard"]):
    """Shards read when they are asked for, each time anew: a job may hold more in them than fits in
    memory.
    """

    def __init__(self, store: Store, known: list[tuple[int, Unit, str]]) -> None:
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


def index_of(name: str) -> int | None:
    """The unit whose shard has this name; None where it is no shard's name."""
    found = _SHARD.fullmatch(name)
    return None if found is None or f"{int(found[1]):06d}" != found[1] else int(found[1])


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def _checked(header: dict[str, Any], path: Path) -> dict[str, Any]:
    """A header from which the run can be known."""
    for field, kind in {"job": str, "spec": dict, "spec_hash": str, "hashes": dict}.items():
        if not isinstance(header.get(field), kind):
            raise Damaged(f"{path}: damaged: its header has no {field}")
    return header


def _bytes(path: Path) -> bytes:
    try:
        return read_own(path)
    except FileNotFoundError as cause:
        raise Damaged(f"{path}: missing") from cause
    except OSError as cause:
        raise Damaged(f"{path}: cannot be read: {cause.strerror or cause}") from cause
