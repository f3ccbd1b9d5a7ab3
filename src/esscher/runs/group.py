"""Several runs in one folder, each under its name: ``group.json`` says which, so that one command
goes on with all of them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esscher.runs.errors import Damaged, RunError
from esscher.runs.files import read_json
from esscher.runs.manifest import GROUP, MANIFEST
from esscher.runs.spec import RunSpec, canonical_json
from esscher.runs.store import write_durable
from esscher.runs.survey import refuse_foreign

__all__ = ["begin_group", "check_name", "read_group"]

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
