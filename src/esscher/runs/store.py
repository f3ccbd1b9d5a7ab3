"""The files of a run directory: shards and final tables.

pyarrow is imported when a file is read: listing runs and counting units needs the names alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esscher.runs.errors import NAME, Damaged, RunError, resume_command
from esscher.runs.files import disk_error, open_regular, sync_folder, write_durable
from esscher.runs.spec import Unit

if TYPE_CHECKING:
    import pyarrow as pa

    from esscher.runs.tables import Shard

PAGE = "report.html"
_SHARD = re.compile(r"[0-9]{6,7}\.parquet")
# temporary files of write_durable
_LEFT = re.compile(r"\.(manifest\.json|[a-z0-9_]+\.parquet)\.[0-9]+\.[0-9a-f]+\.tmp")


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
        try:
            for folder in (self.path, self.shards):
                folder.mkdir(parents=True, exist_ok=True)
                sync_folder(folder.parent)
        except OSError as cause:
            raise disk_error(cause, self.path) from cause

    def refuse_link(self) -> None:
        """Refuse a symbolic link to the shards' folder: behind it are others' files."""
        if self.shards.is_symlink():
            raise RunError(
                f"{self.shards}: expected a folder, got a symbolic link, which is not followed;"
                " remove it"
            )

    def clean(self) -> None:
        """Remove the temporary files of killed writers; only for the holder of the lock."""
        try:
            for folder in (self.path, self.shards):
                with os.scandir(folder) as entries:
                    left = [entry for entry in entries if _LEFT.fullmatch(entry.name)]
                for entry in left:
                    if entry.is_file(follow_symlinks=False):
                        os.unlink(entry.path)
        except OSError as cause:
            raise disk_error(cause, self.path) from cause

    def remove_page(self) -> None:
        """Remove the report: it will be out of date."""
        page = self.path / PAGE
        if page.is_file() and not page.is_symlink():
            self._unlink(page)

    def shard_path(self, index: int) -> Path:
        return self.shards / f"{index:06d}.parquet"

    def indices(self, units: int | None = None) -> list[int]:
        """Units that have a shard, sound or not; those of the first ``units`` where told."""
        found = (int(name[:-8]) for name in self._names() if _is_shard(name))
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
        self._unlink(path)

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as cause:
            raise disk_error(cause, path) from cause

    def read_shard_header(self, index: int) -> dict[str, Any]:
        """The header of a shard whose checksum holds."""
        from esscher.runs.tables import read_shard_header

        path = self.shard_path(index)
        return read_shard_header(_bytes(path), str(path))

    def read_shard(self, index: int, spec_hash: str, unit: Unit | None = None) -> Shard:
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

    def stored(self, units: list[Unit], spec_hash: str) -> Shards:
        """What the units produced, those that are there, in their order."""
        return Shards(
            self, [(index, spec_hash, units[index]) for index in self.indices(len(units))]
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
    """Shards read each time they are asked for: together they may not fit in memory."""

    def __init__(self, store: Store, known: list[tuple[int, str, Unit]]) -> None:
        self._store, self._known = store, known

    def __len__(self) -> int:
        return len(self._known)

    def __getitem__(self, place: int) -> Shard:  # type: ignore[override]
        return self._store.read_shard(*self._known[place])


def _is_shard(name: str) -> bool:
    """A number of six digits, or of seven where six do not suffice."""
    return _SHARD.fullmatch(name) is not None and f"{int(name[:-8]):06d}" == name[:-8]


def _bytes(path: Path) -> bytes:
    try:
        with open_regular(path, follow=False) as file:
            return file.read()
    except FileNotFoundError as cause:
        raise Damaged(f"{path}: missing") from cause
    except OSError as cause:
        raise Damaged(f"{path}: cannot be read: {cause.strerror or cause}") from cause
