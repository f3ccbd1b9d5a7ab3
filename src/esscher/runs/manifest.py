"""The manifest of a run: what it is, where it comes from, how far it got."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from esscher.runs.errors import SCHEMA, Damaged, RunError, check_schema, field_lines, resume_command
from esscher.runs.files import read_json, write_durable
from esscher.runs.spec import MOST_UNITS, Plain, RunSpec, Unit, digest
from esscher.runs.store import Store

MANIFEST = "manifest.json"
LOCK = "lock"
VERDICTS = "reproduce.json"  # in a folder of runs that test claims
Status = Literal["running", "complete", "incomplete", "failed"]


class Failure(Plain):
    """A unit that failed every time it was tried."""

    index: int
    unit: Unit
    reason: str
    tries: int
    traceback: str = ""


class Start(Plain):
    """One start of the run, the first or a resumption: code, machine and executor."""

    started: str
    executor: str
    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str | None = None

    @classmethod
    def here(cls, executor: str) -> Start:
        return cls(
            started=now(),
            executor=executor,
            machine=machine(),
            versions=versions(),
            commit=commit(),
        )


class Manifest(Plain):
    """``manifest.json``. ``status`` is as last written: a killed run still says running (see
    Run.status).
    """

    schema_version: int = SCHEMA
    job: str
    spec: dict[str, Any]
    spec_hash: str
    hashes: dict[str, str]  # of what the result depends on beside the spec: model, corpus
    units: int = Field(ge=1, le=MOST_UNITS)
    units_hash: str
    seed: int
    device: str
    dtype: str
    threads: int
    status: Status
    started: str
    ended: str | None = None
    starts: tuple[Start, ...] = Field(min_length=1)
    failures: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()  # damaged shards computed again, a manifest rebuilt
    stopped: str | None = None  # what ended the last start before the run was complete
    tables: dict[str, int] = Field(default={})  # final tables and their numbers of rows
    checksums: dict[str, str] = Field(
        default={}
    )  # of the final tables; an early esscher wrote none

    @classmethod
    def begin(
        cls, spec: RunSpec, units: list[Unit], hashes: dict[str, str], start: Start
    ) -> Manifest:
        return cls(
            **spec.model_dump(include={"job", "seed", "device", "dtype", "threads"}),
            spec=spec.as_dict(),
            spec_hash=spec.hash,
            hashes=hashes,
            units=len(units),
            units_hash=digest(units),
            status="running",
            started=start.started,
            starts=(start,),
        )

    @property
    def header(self) -> dict[str, Any]:
        """What every file of the run carries: enough to write this manifest again."""
        return {
            "job": self.job,
            "spec": self.spec,
            "spec_hash": self.spec_hash,
            "hashes": self.hashes,
        }

    def replaced(self, **changes: Any) -> Manifest:
        return self.model_copy(update=changes)

    def write(self, store: Store) -> None:
        text = json.dumps(
            self.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False
        )
        write_durable(store.path / MANIFEST, text.encode("utf-8") + b"\n")


def read_manifest(path: Path) -> Manifest:
    """The manifest of a run directory, or a RunError that says what is wrong and what to do."""
    file = path / MANIFEST
    remedy = (
        f"{Store(path).count()} finished units are kept, and {resume_command(path)} writes it again"
        " from them"
    )
    try:
        content = read_json(file)
        check_schema(content.get("schema_version"), str(file))
        manifest = Manifest.model_validate(content)
    except FileNotFoundError as cause:
        if not path.is_dir():
            missing = "no such run directory"
        elif Store(path).count() == 0:
            missing = f"not a run directory: it has no {MANIFEST}"
        else:
            missing = f"its {MANIFEST} is missing; {remedy}"
        raise Damaged(f"{path}: {missing}") from cause
    except ValueError as cause:
        short = str(cause).splitlines()[0]
        if isinstance(cause, ValidationError):
            short = field_lines(cause, most=2)
        raise Damaged(f"{file}: damaged or truncated ({short}); {remedy}") from cause
    except OSError as cause:
        raise RunError(f"{file}: cannot be read: {cause.strerror or cause}") from cause
    if digest(manifest.spec) != manifest.spec_hash:
        raise RunError(
            f"{file}: the spec in it was changed; start a new run with the spec you want"
        )
    return manifest


# ---- Where a result comes from: versions, commit, machine.

# Those whose version can change a bit of a result or of a file.
_PACKAGES = ("esscher", "torch", "numpy", "scipy", "numba", "pandas", "pyarrow", "transformers")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@functools.cache
def versions() -> dict[str, str]:
    """Python and the packages that matter, as installed; nothing is imported."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def machine() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "pid": os.getpid(),
    }


@functools.cache
def commit() -> str | None:
    """The commit of this source, with -dirty if changed since; None where it is not known."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        text = importlib.metadata.distribution("esscher").read_text("direct_url.json")
        installed = json.loads(text or "{}").get("vcs_info", {}).get("commit_id")
        if installed:  # pip wrote it down when it installed from a repository
            return str(installed)
    # a virtual environment may lie in another repository, which does not keep this file
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _git("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
