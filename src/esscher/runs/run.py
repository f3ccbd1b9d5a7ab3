"""Run directories: the manifest of a run, its tables, export for other tools. Reading needs neither
the job's code nor torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import json
import logging
import os
import platform
import socket
import subprocess
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from esscher.runs.errors import (
    Damaged,
    RunError,
    StoreError,
    field_lines,
    one_line,
    plain,
    resume_command,
)
from esscher.runs.progress import Progress
from esscher.runs.spec import Plain, RunSpec, Unit, digest
from esscher.runs.store import Store, is_held, read_json, write_durable

if TYPE_CHECKING:
    import pyarrow as pa

    from esscher.runs.columns import Column

MANIFEST = "manifest.json"
SCHEMA = 1  # version of the stored files, raised when their meaning changes
LOCK = ".lock"
VERDICTS = "reproduce.json"  # in a folder of runs that test claims
Status = Literal["running", "complete", "incomplete", "failed"]
EXPORTS = ("csv", "json")  # of exported tables
_log = logging.getLogger("esscher.runs")


# ---- The manifest: what a run is, where it comes from, how far it got.


class Failure(Plain):
    """A unit that failed every time it was tried."""

    index: int
    unit: Unit
    reason: str
    traceback: str = ""


class Start(Plain):
    """One start of the run, the first or a resumption: code, machine and executor."""

    started: str
    executor: str
    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str | None = None


class Manifest(Plain):
    """``manifest.json``; the status of a killed run still says running (see Run.status)."""

    schema_version: int = SCHEMA
    job: str
    spec: dict[str, Any]
    spec_hash: str
    hashes: dict[str, str]  # of what the result depends on beside the spec: model, corpus
    units: int
    status: Status
    started: str
    ended: str | None = None
    starts: tuple[Start, ...] = Field(min_length=1)
    failures: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()  # damaged shards computed again, other versions
    stopped: str | None = None  # what ended the last start before the run was complete
    tables: dict[str, int] = Field(default={})  # final tables and their numbers of rows
    checksums: dict[str, str] = Field(default={})  # of the final tables

    @classmethod
    def begin(
        cls,
        spec: RunSpec,
        units: list[Unit],
        hashes: dict[str, str],
        start: Start,
        *,
        before: Manifest | None = None,
        notes: Sequence[str] = (),
    ) -> Manifest:
        """The manifest of one more start of the run; ``before``: as the last one left it."""
        return cls(
            job=spec.job,
            spec=spec.as_dict(),
            spec_hash=spec.hash,
            hashes=hashes,
            units=len(units),
            status="running",
            started=before.started if before else start.started,
            starts=(*(before.starts if before else ()), start),
            notes=(*(before.notes if before else ()), *notes),
        )

    @property
    def header(self) -> dict[str, Any]:
        """What every file of the run carries."""
        return {
            "job": self.job,
            "spec": self.spec,
            "spec_hash": self.spec_hash,
            "hashes": self.hashes,
        }

    def write(self, store: Store) -> None:
        text = json.dumps(
            self.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False
        )
        write_durable(store.path / MANIFEST, text.encode("utf-8") + b"\n")


def read_manifest(path: Path) -> Manifest:
    """The manifest of a run directory, or a RunError that says what is wrong and what to do."""
    file = path / MANIFEST
    if not path.is_dir():
        raise RunError(f"{path}: no such run directory")
    if not file.exists():
        raise RunError(f"{path}: not a run directory: it has no {MANIFEST}")
    try:
        content = read_json(file)
        if (schema := content.get("schema_version")) != SCHEMA:
            raise RunError(
                f"{file}: written in schema {schema} by another esscher; this one reads schema"
                f" {SCHEMA}, so use the version that wrote it"
            )
        manifest = Manifest.model_validate(content)
    except ValueError as cause:
        short = str(cause).splitlines()[0]
        if isinstance(cause, ValidationError):
            short = field_lines(cause, most=2)
        raise Damaged(f"{file}: damaged ({short}); start the run again in a new folder") from cause
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
    """The commit of this source, with -dirty if changed since; None outside a repository."""
    folder = Path(__file__).parents[3]
    if not (folder / ".git").exists():  # installed, maybe inside of another repository
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty"]
    command.append("--exclude=*")
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.SubprocessError):
        return None


# ---- A stored run.

VIEWS: dict[str, str] = {
    "plot_map": "esscher.report.figures:plot_map",
    "plot_error": "esscher.report.figures:plot_error",
    "summary": "esscher.report.words:text_summary",
    "_repr_html_": "esscher.report.words:html_summary",
    "budget": "esscher.probe.budget:budget",
    "rank_rules": "esscher.probe.budget:rank_rules",
}
"""Name of a view -> "module:function" of a function of a run, of its tables, or of a curve."""


def find_view(name: str) -> Callable[..., Any]:
    module, _, attribute = VIEWS[name].partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found


@dataclass(frozen=True, repr=False)
class Run:
    """A run directory: its manifest as it was when read, its tables as pandas frames."""

    path: Path
    manifest: Manifest

    @property
    def spec(self) -> dict[str, Any]:
        return self.manifest.spec

    @property
    def status(self) -> Status:
        """complete, incomplete, failed, or running. A run whose writer was killed is incomplete."""
        if self.manifest.status != "running":
            return self.manifest.status
        if is_held(self.path / LOCK):
            return "running"
        # Nobody writes it: it ended since the manifest was read, or it was killed.
        status = read_manifest(self.path).status
        return "incomplete" if status == "running" else status

    @property
    def failures(self) -> tuple[Failure, ...]:
        return self.manifest.failures

    @property
    def progress(self) -> Progress:
        """Units finished now, by the shards there are."""
        done, total = Store(self.path).count(self.manifest.units), self.manifest.units
        return Progress(done, total, len(self.failures), ended=self.status != "running")

    @property
    def tables(self) -> list[str]:
        """Names of the final tables."""
        return sorted(self.manifest.tables)

    def arrow(self, name: str) -> pa.Table:
        """A final table as Arrow, its checksum verified."""
        if name not in self.tables:
            progress, known = self.progress, ", ".join(self.tables)
            if known:
                raise ValueError(f"{self.path}: no table {name!r}; there are: {known}")
            raise ValueError(
                f"{self.path}: no tables yet, {progress.done} of {progress.total} units are done"
                f" ({self.status}); {resume_command(self.path)} completes it, and"
                f" partial({name!r}) shows what there is"
            )
        return Store(self.path).read_table(name, self.manifest.checksums[name])

    def table(self, name: str) -> Any:
        """A final table as a pandas frame, its checksum verified."""
        return self.arrow(name).to_pandas()

    def columns(self, name: str) -> dict[str, Column]:
        """Descriptions of a table's columns, in their order."""
        from esscher.runs.columns import columns_of

        return columns_of((self.arrow(name) if self.tables else self._finished(name)).schema)

    def partial(self, name: str) -> Any:
        """Rows of the units finished so far, before consolidation, as a pandas frame."""
        return self._finished(name).to_pandas()

    def _finished(self, name: str) -> pa.Table:
        from esscher.runs.tables import concatenate

        store, spec_hash = Store(self.path), self.manifest.spec_hash
        indices = store.indices(self.manifest.units)
        found = concatenate(None, [store.read_shard(index, spec_hash) for index in indices])
        if name not in found:
            raise ValueError(
                f"{self.path}: no finished unit has a table {name!r}; there are:"
                f" {', '.join(found) or 'none'}"
            )
        return found[name]

    def __getattr__(self, name: str) -> Any:
        """A view of the run as a method: summary(), budget(...), plot_map(...), see VIEWS."""
        if name not in VIEWS:
            raise AttributeError(f"a Run has no {name!r}")
        return types.MethodType(find_view(name), self)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *VIEWS})

    def __repr__(self) -> str:
        tables = ", ".join(self.tables) or "none yet"
        return (
            f"Run({str(self.path)!r}: {self.manifest.job}, {self.manifest.status}, tables {tables})"
        )


def load_run(path: str | os.PathLike[str]) -> Run:
    """A stored run, finished or not."""
    return Run(Path(path), read_manifest(Path(path)))


def list_runs(folder: str | os.PathLike[str] = ".") -> list[Run]:
    """The runs in a folder, oldest first; what cannot be read is named in the log and left out."""
    root = Path(folder)
    if not root.is_dir():
        raise RunError(f"{root}: no such folder")
    runs = []
    for path in sorted(root.iterdir()):
        try:
            if (path / MANIFEST).exists():
                runs.append(load_run(path))
        except RunError as cause:
            _log.warning("%s", one_line(str(cause)))
    return sorted(runs, key=lambda run: run.manifest.started)


def export_run(
    path: str | os.PathLike[str],
    to: str = "csv",
    out: str | os.PathLike[str] = ".",
    *,
    overwrite: bool = False,
) -> list[Path]:
    """Write every final table of a run into the folder ``out``, a file each, and return the files.

    "json" is a list of rows, with null where a number is none. The run directory has the tables as
    Parquet. Files that are there already are refused unless ``overwrite``.
    """
    if to not in EXPORTS:
        raise ValueError(f"to: expected one of {', '.join(EXPORTS)}, got {to!r}")
    run, folder = load_run(path), Path(out)
    if not run.tables:
        raise RunError(f"{run.path}: no tables to export yet ({run.status})")
    files = {name: folder / f"{name}.{to}" for name in run.tables}
    there = [file for file in files.values() if file.exists()]
    if there and not overwrite:
        raise ValueError(
            f"out: {there[0]} is there already; choose another folder, or ask to overwrite it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in files.items():
        if to == "csv":
            text = run.table(name).to_csv(index=False)
        else:
            rows = plain(run.arrow(name).to_pylist())
            text = json.dumps(rows, indent=1, ensure_ascii=False) + "\n"
        write_durable(file, text.encode("utf-8"))
    return list(files.values())


# ---- Whether a folder is free for a run.


def refuse_foreign(path: Path) -> None:
    """Refuse a folder with other things in it, or one that cannot be written to."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise RunError(f"{path}: {there} is a file; choose another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise StoreError(f"{path}: cannot be written: no permission to write in {there}")
    if path.is_dir() and not (path / MANIFEST).exists():
        names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
        if names not in ([], ["shards"]) or Store(path).count():
            raise RunError(
                f"{path}: holds {names[0]!r} and no run; choose an empty folder or a new one"
            )
