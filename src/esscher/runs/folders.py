"""Folders for runs: whether one is free for a run, and several runs in one folder (a group), which
``group.json`` names so that one command goes on with all of them.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from esscher.runs.errors import Damaged, RunError
from esscher.runs.files import disk_error, read_json, write_durable
from esscher.runs.manifest import GROUP, LOCK, MANIFEST, Manifest, read_manifest
from esscher.runs.spec import RunSpec, canonical_json
from esscher.runs.store import Store

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")


def refuse_foreign(
    path: Path, spec: RunSpec | None = None, left_open: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Refuse a folder with other things in it, or with another run, or that cannot be written to.

    ``left_open``: fields of the spec with the values that stand for what is not yet decided.
    """
    if path.exists() and not path.is_dir():
        raise RunError(f"{path}: expected a folder, or a name that is free, got a file")
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise RunError(f"{path}: cannot be made: {there} is a file; choose another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        raise disk_error(OSError(errno.EROFS if read_only else errno.EACCES, ""), path)
    if (path / MANIFEST).exists():
        try:
            previous = None if spec is None else read_manifest(path)
        except Damaged:
            return  # the start of the run says what is wrong
        if spec is not None and previous is not None:
            given = spec.as_dict()
            undecided = {name for name, value in left_open.items() if given.get(name) == value}
            refuse_other(path, previous, spec, undecided)
    elif path.is_dir() and not Store(path).shards.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        other = [name for name in names if name != LOCK and not name.startswith(".")]
        if other:
            raise RunError(
                f"{path}: holds {other[0]!r} and no run; choose an empty folder or a new one"
            )


def refuse_other(
    path: Path, previous: Manifest, spec: RunSpec, undecided: set[str] | None = None
) -> None:
    """Refuse a folder whose run has another spec; fields that are undecided may differ."""
    here, there = spec.as_dict(), previous.spec
    differing = {name for name in {*here, *there} if here.get(name) != there.get(name)}
    if differing - (undecided or set()):
        found = ", ".join(
            f"{name} is {canonical_json(there.get(name))} there" for name in sorted(differing)
        )
        raise RunError(f"{path}: holds another run: {found}; choose another folder")


def check_name(name: str) -> str:
    """The name of a run in a group, which is that of its folder."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"expected a name of letters, digits, - and _, 40 at most, got {name!r}")
    return name


def begin_group(path: Path, specs: Mapping[str, RunSpec]) -> None:
    """Make a folder for runs of these specs, by name; a folder with others is refused."""
    if os.path.lexists(path / MANIFEST):
        raise RunError(f"{path}: holds one run, not several; choose another folder")
    asked = {name: spec.as_dict() for name, spec in specs.items()}
    known = read_group(path)
    if known is None:
        refuse_foreign(path)
        path.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"runs": asked}, indent=2, ensure_ascii=False)
        write_durable(path / GROUP, text.encode("utf-8") + b"\n")
    elif canonical_json(known) != canonical_json(asked):
        raise RunError(
            f"{path}: holds other runs ({', '.join(known)}), or with other settings; choose"
            " another folder"
        )


def read_group(path: Path) -> dict[str, dict[str, Any]] | None:
    """Fields of the specs of a folder's runs, by name and in their order; None where it holds no
    group.
    """
    file = path / GROUP
    if not os.path.lexists(file):
        return None
    try:
        runs = read_json(file)["runs"]
        if not runs or not isinstance(runs, dict):
            raise ValueError("expected the specs of runs by name")
        if not all(isinstance(fields, dict) for fields in runs.values()):
            raise ValueError("expected the specs of runs by name")
        return {check_name(name): fields for name, fields in runs.items()}
    except (ValueError, LookupError) as cause:
        reason = str(cause).splitlines()[0][:120]
        raise Damaged(
            f"{file}: damaged ({reason}); its runs are whole, each in its own folder"
        ) from cause
    except OSError as cause:
        raise RunError(f"{file}: cannot be read: {cause.strerror or cause}") from cause
