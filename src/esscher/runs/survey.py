"""What a run directory already holds: which run it is, which units are sound, what was damaged."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from esscher.runs.errors import Damaged, RunError
from esscher.runs.files import read_json
from esscher.runs.job import Job, find_job, read_spec, units_of
from esscher.runs.manifest import GROUP, MANIFEST, Manifest, read_manifest, versions
from esscher.runs.spec import RunSpec, Unit, canonical_json, digest
from esscher.runs.store import Store, disk_error, write_durable


@dataclass(frozen=True)
class Found:
    """A run as it is on the disk, ready to go on: everything still to do follows from it."""

    job: Job
    spec: RunSpec
    units: list[Unit]
    hashes: dict[str, str]
    previous: Manifest | None
    done: frozenset[int]
    notes: tuple[str, ...]

    @property
    def pending(self) -> list[int]:
        return [index for index in range(len(self.units)) if index not in self.done]


def refuse_foreign(
    path: Path, spec: RunSpec | None = None, left_open: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """A folder with other things in it, or with another run, or that cannot be written to, is no
    place for a run.

    ``left_open``: fields of the spec, and the values that stand for what is not yet decided.
    """
    if path.exists() and not path.is_dir():
        raise RunError(f"{path}: expected a folder, or a name that is free, got a file")
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise RunError(f"{path}: cannot be made: {there} is a file; choose another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        raise disk_error(OSError(errno.EROFS if read_only else errno.EACCES, ""), path)
    if spec is not None and (path / MANIFEST).exists():
        _refuse_other(path, spec, left_open)
    if not path.is_dir() or (path / MANIFEST).exists() or Store(path).shards.is_dir():
        return
    other = sorted(
        entry.name
        for entry in path.iterdir()
        if entry.name != "lock" and not entry.name.startswith(".")
    )
    if other:
        raise RunError(
            f"{path}: holds {other[0]!r} and no run; choose an empty folder or a new one"
        )


def _refuse_other(path: Path, spec: RunSpec, left_open: Mapping[str, Any]) -> None:
    try:
        previous = read_manifest(path)
    except Damaged:
        return  # who goes on with the run says what is wrong with it
    here = spec.as_dict()
    unknown = {name for name, value in left_open.items() if here.get(name) == value}
    if _differing(previous, spec) - unknown:
        raise RunError(_another(path, previous, spec))


def _another(path: Path, previous: Manifest, spec: RunSpec) -> str:
    return f"{path}: holds another run: {_difference(previous, spec)}; choose another folder"


def survey(store: Store, spec: RunSpec | None) -> Found:
    """What there is of the run of ``spec``, or of whichever run it is. Damaged shards are removed
    and named.
    """
    previous, notes = _previous(store)
    if spec is None:
        spec = _recorded_spec(store, previous)
    elif previous is not None and previous.spec_hash != spec.hash:
        raise RunError(_another(store.path, previous, spec))
    job = find_job(spec.job)
    units = units_of(job, spec)
    hashes = {name: str(value) for name, value in job.hashes(spec).items()}
    if previous is not None:
        _check_unchanged(store.path, previous, units, hashes)
        notes += _other_versions(previous)
    done, damaged = _sound_shards(store, spec, units, hashes, known=previous is not None)
    return Found(job, spec, units, hashes, previous, frozenset(done), (*notes, *damaged))


def _previous(store: Store) -> tuple[Manifest | None, tuple[str, ...]]:
    try:
        manifest = read_manifest(store.path)
    except Damaged as cause:
        if store.count() == 0 and not os.path.lexists(store.path / MANIFEST):
            return None, ()
        return None, (f"{cause}: done now",)
    return manifest, ()


def _recorded_spec(store: Store, previous: Manifest | None) -> RunSpec:
    """The spec as the manifest has it, or any sound shard."""
    if previous is not None:
        fields, expected = previous.spec, previous.spec_hash
    else:
        header = _any_header(store)
        fields, expected = header["spec"], header["spec_hash"]
    spec = read_spec(fields)
    if spec.hash != expected:
        raise RunError(
            f"{store.path}: this esscher reads the spec of the run differently; use the version"
            " that began it"
        )
    return spec


def _any_header(store: Store) -> dict[str, Any]:
    for index in store.indices():
        try:
            return store.read_shard_header(index)
        except Damaged:
            continue
    raise Damaged(
        f"{store.path}: no manifest and no sound shard, so the run cannot be known; start it again"
    )


def _check_unchanged(
    path: Path, previous: Manifest, units: list[Unit], hashes: dict[str, str]
) -> None:
    if previous.units_hash != digest(units):
        raise RunError(
            f"{path}: began with other units than its job now lists; use the esscher that began it,"
            " or start a new run"
        )
    changed = sorted(
        name
        for name in {*previous.hashes, *hashes}
        if previous.hashes.get(name) != hashes.get(name)
    )
    if changed:
        raise RunError(
            f"{path}: its {', '.join(changed)} changed since it began; restore it, or start a"
            " new run"
        )


def _other_versions(previous: Manifest) -> tuple[str, ...]:
    before, here = previous.starts[-1].versions, versions()
    changed = [
        f"{name} {here.get(name)}, before {before.get(name)}"
        for name in here
        if here[name] != before.get(name)
    ]
    return (
        (f"goes on with other versions, so bits may differ: {'; '.join(changed)}",)
        if changed
        else ()
    )


def _difference(previous: Manifest, spec: RunSpec) -> str:
    names = sorted(_differing(previous, spec))
    return ", ".join(f"{name} is {canonical_json(previous.spec.get(name))} there" for name in names)


def _differing(previous: Manifest, spec: RunSpec) -> set[str]:
    """Fields in which two specs differ."""
    here, there = spec.as_dict(), previous.spec
    return {name for name in {*here, *there} if here.get(name) != there.get(name)}


def _sound_shards(
    store: Store, spec: RunSpec, units: list[Unit], hashes: dict[str, str], *, known: bool
) -> tuple[set[int], list[str]]:
    """Units whose shards hold, and a line for each that did not. ``known``: a manifest says whose
    shards these are.
    """
    done: set[int] = set()
    notes = [
        f"{name}: not a shard of this run; left alone, and none of it is in the tables"
        for name in store.strays(len(units))
    ]
    expected = (spec.job, spec.hash, hashes)
    for index in store.indices(len(units)):
        path = store.shard_path(index)
        try:
            header = store.read_shard_header(index)
            if (header["job"], header["spec_hash"], header["hashes"]) != expected:
                if not known:
                    raise RunError(
                        f"{path}: belongs to another run, or to one on other data; choose another"
                        " folder"
                    )
                raise Damaged(f"{path}: damaged: belongs to another run")
            if header["index"] != index or header["unit"] != units[index]:
                raise Damaged(f"{path}: damaged: holds another unit than its name says")
        except Damaged as cause:
            store.remove_shard(index)
            notes.append(f"{cause}; its unit is computed again")
        else:
            done.add(index)
    return done, notes


# ---- Several runs in one folder, each under its name: ``group.json`` says which, so that one
# command goes on with all of them.

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")


def check_name(name: str) -> str:
    """The name of a run in a group, which is that of its folder."""
    if not NAME.fullmatch(name):
        raise ValueError(f"expected a name of letters, digits, - and _, 40 at most, got {name!r}")
    return name


def begin_group(path: Path, specs: Mapping[str, RunSpec]) -> None:
    """A folder for runs of these specs, by name; one that holds others, or other things, is
    refused.
    """
    if os.path.lexists(path / MANIFEST):
        raise RunError(f"{path}: holds one run, not several; choose another folder")
    asked = {name: spec.as_dict() for name, spec in specs.items()}
    known = read_group(path)
    if known is not None:
        if canonical_json(known) != canonical_json(asked):
            raise RunError(
                f"{path}: holds other runs ({', '.join(known)}), or with other settings; choose"
                " another folder"
            )
        return
    refuse_foreign(path)
    path.mkdir(parents=True, exist_ok=True)
    write_durable(
        path / GROUP,
        json.dumps({"runs": asked}, indent=2, ensure_ascii=False).encode("utf-8") + b"\n",
    )


def read_group(path: Path) -> dict[str, dict[str, Any]] | None:
    """The fields of the specs of a folder's runs, by name and in their order; None where it holds
    no group.
    """
    if not os.path.lexists(path / GROUP):
        return None
    try:
        runs = read_json(path / GROUP)["runs"]
        if (
            not isinstance(runs, dict)
            or not runs
            or not all(isinstance(fields, dict) for fields in runs.values())
        ):
            raise ValueError("expected the specs of runs by name")
        return {check_name(name): fields for name, fields in runs.items()}
    except (ValueError, LookupError) as cause:
        reason = str(cause).splitlines()[0][:120]
        raise Damaged(
            f"{path / GROUP}: damaged ({reason}); its runs are whole, each in its own folder"
        ) from cause
    except OSError as cause:
        raise RunError(f"{path / GROUP}: cannot be read: {cause.strerror or cause}") from cause
