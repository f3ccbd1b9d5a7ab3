"""The manifest of a run: what it is, where it comes from, how far it got."""

from __future__ import annotations

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

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from esscher.runs.errors import SCHEMA, Damaged, RunError, check_schema, field_lines, resume_command
from esscher.runs.files import read_json
from esscher.runs.job import MOST_UNITS
from esscher.runs.spec import RunSpec, Unit, digest
from esscher.runs.store import Store, write_durable

MANIFEST = "manifest.json"
GROUP = "group.json"  # in a folder of several runs
VERDICTS = "reproduce.json"  # in a folder of runs that test claims
Status = Literal["running", "complete", "incomplete", "failed"]


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Failure(_Record):
    """A unit that failed every time it was tried."""

    index: int
    unit: Unit
    reason: str
    tries: int
    traceback: str = ""


class Start(_Record):
    """One start of the run, the first or a resumption: which code, on what machine, by which
    executor.
    """

    started: str
    executor: str
    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str | None = None


class Manifest(_Record):
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
    # what a reader should know: damaged shards done again, a manifest rebuilt
    notes: tuple[str, ...] = ()
    # what ended the last start before the run was complete; the next start forgets it
    stopped: str | None = None
    tables: dict[str, int] = {}  # final tables and their numbers of rows
    # and the checksum each carries; runs begun by an early esscher have none
    checksums: dict[str, str] = {}

    @classmethod
    def begin(
        cls, spec: RunSpec, units: list[Unit], hashes: dict[str, str], start: Start
    ) -> Manifest:
        return cls(
            job=spec.job,
            spec=spec.as_dict(),
            spec_hash=spec.hash,
            hashes=hashes,
            units=len(units),
            units_hash=digest(units),
            seed=spec.seed,
            device=spec.device,
            dtype=spec.dtype,
            threads=spec.threads,
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
    try:
        content = read_json(file)
        check_schema(content.get("schema_version"), str(file))
        manifest = Manifest.model_validate(content)
    except FileNotFoundError as cause:
        raise Damaged(_missing(path)) from cause
    except ValueError as cause:
        raise Damaged(f"{file}: damaged or truncated ({_short(cause)}); {_remedy(path)}") from cause
    except OSError as cause:
        raise RunError(f"{file}: cannot be read: {cause.strerror or cause}") from cause
    if digest(manifest.spec) != manifest.spec_hash:
        raise RunError(
            f"{file}: the spec in it was changed; start a new run with the spec you want"
        )
    return manifest


def _missing(path: Path) -> str:
    if not path.is_dir():
        return f"{path}: no such run directory"
    if os.path.lexists(path / GROUP):
        return f"{path}: holds several runs, each in a folder of its own; name one of these"
    if Store(path).count() == 0:
        return f"{path}: not a run directory: it has no {MANIFEST}"
    return f"{path}: its {MANIFEST} is missing; {_remedy(path)}"


def _remedy(path: Path) -> str:
    return (
        f"{Store(path).count()} finished units are kept, and {resume_command(path)} writes it again"
        " from them"
    )


def _short(cause: Exception) -> str:
    if isinstance(cause, ValidationError):
        return field_lines(cause, most=2)
    return str(cause).splitlines()[0]


# ---- Where a result comes from: versions, commit, machine.

# Those whose version can change a bit of a result or of a file.
_PACKAGES = ("esscher", "torch", "numpy", "scipy", "numba", "pandas", "pyarrow", "transformers")


@functools.cache
def versions() -> dict[str, str]:
    """Python and the packages that matter, as installed; nothing is imported."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
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
    return _installed_commit() or _checked_out_commit()


def _installed_commit() -> str | None:
    """As pip wrote it down when it installed from a repository."""
    try:
        text = importlib.metadata.distribution("esscher").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    found = json.loads(text or "{}").get("vcs_info", {}).get("commit_id")
    return str(found) if found else None


def _checked_out_commit() -> str | None:
    """As git says, if git keeps this very file: a virtual environment may lie in somebody else's
    repository.
    """
    here = Path(__file__)
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    return _git(here.parent, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
