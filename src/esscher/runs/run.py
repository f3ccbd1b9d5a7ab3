"""Run directories: the manifest of a run, its tables, export for other tools. Reading needs neither
the job's code nor torch.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import importlib.metadata
import json
import logging
import os
import platform
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from esscher.runs.errors import (
    SCHEMA,
    Damaged,
    RunError,
    check_schema,
    field_lines,
    one_line,
    plain,
    resume_command,
)
from esscher.runs.progress import Progress
from esscher.runs.spec import MOST_UNITS, Plain, RunSpec, Unit, canonical_json, digest
from esscher.runs.store import Store, disk_errors, is_held, read_json, write_durable

if TYPE_CHECKING:
    import pyarrow as pa

    from esscher.runs.columns import Column

MANIFEST = "manifest.json"
LOCK = "lock"
VERDICTS = "reproduce.json"  # in a folder of runs that test claims
Status = Literal["running", "complete", "incomplete", "failed"]
ENDINGS = {"csv": ".csv", "json": ".json", "parquet": ".parquet", "netcdf": ".nc"}
"""Formats of exported tables and the ends of their files' names."""
_log = logging.getLogger("esscher.runs")


# ---- The manifest: what a run is, where it comes from, how far it got.


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


# ---- A stored run.

VIEWS: dict[str, str] = {
    "plot_curve": "esscher.report.figures:plot_curve",
    "plot_map": "esscher.report.figures:plot_map",
    "plot_rates": "esscher.report.figures:plot_rates",
    "plot_error": "esscher.report.figures:plot_error",
    "html": "esscher.report.words:html_summary",
    "text": "esscher.report.words:text_summary",
    "budget": "esscher.probe.budget:budget_of",
}
"""Name of a view -> "module:function" of a function of a run, or of what else shows itself."""


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
        if name not in self.tables and self.tables:
            raise ValueError(f"{self.path}: no table {name!r}; there are: {', '.join(self.tables)}")
        if name not in self.tables:
            progress = self.progress
            raise ValueError(
                f"{self.path}: no tables yet, {progress.done} of {progress.total} units are done"
                f" ({self.status}); {resume_command(self.path)} completes it, and"
                f" partial({name!r}) shows what there is"
            )
        return Store(self.path).read_table(
            name, self.manifest.spec_hash, self.manifest.checksums.get(name)
        )

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

    def plot_curve(self, layer: int, head: int, *, ax: Any = None) -> Any:
        """Error of one head of a probe against the number of tokens, with theory; returns the
        matplotlib axes.
        """
        return find_view("plot_curve")(self, layer, head, ax=ax)

    def plot_map(self, column: str = "tokens_needed_10pct", *, ax: Any = None) -> Any:
        """Layers and heads of a probe coloured by a column of the heads table; returns the
        matplotlib axes.
        """
        return find_view("plot_map")(self, column, ax=ax)

    def plot_rates(self, against: str = "horizon2", *, ax: Any = None) -> Any:
        """Measured exponents of a probe's heads with theory; returns the matplotlib axes."""
        return find_view("plot_rates")(self, against, ax=ax)

    def summary(self) -> str:
        """What the run is, how far it got, what it found and its tables, in a few lines."""
        return str(find_view("text")(self))

    def budget(
        self,
        epsilon: float | None = None,
        *,
        total: int | None = None,
        kl: float | None = None,
        rule: str | None = None,
    ) -> Any:
        """Keys that a keep rule needs in each cache of a probe: for an error (0.1 unless told), for
        a predicted loss of ``kl`` nats per token, or of a total.

        ``rule``: one that the run measured. When left out: for a loss the one whose cache is
        smallest, else random keys. The answer, that of ``esscher budget``, has tables ``caches``
        and ``totals``.
        """
        return find_view("budget")(self, epsilon, total, rule, kl)

    def __repr__(self) -> str:
        tables = ", ".join(self.tables) or "none yet"
        return (
            f"Run({str(self.path)!r}: {self.manifest.job}, {self.manifest.status}, tables {tables})"
        )

    def _repr_html_(self) -> str:
        return str(find_view("html")(self))


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
            if os.path.lexists(path / MANIFEST) or Store(path).count():
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

    "json" is a list of rows, with null where a number is none. "netcdf" is one xarray dataset per
    table along the dimension "row", with the spec among its attributes. Files that are there
    already are refused unless ``overwrite``.
    """
    if to not in ENDINGS:
        raise ValueError(f"to: expected one of {', '.join(ENDINGS)}, got {to!r}")
    run, folder = load_run(path), Path(out)
    if not run.tables:
        raise RunError(f"{run.path}: no tables to export yet ({run.status})")
    if folder.resolve() == run.path.resolve():
        raise ValueError(f"out: expected another folder than the run itself, got {folder}")
    files = {name: folder / f"{name}{ENDINGS[to]}" for name in run.tables}
    there = [file for file in files.values() if os.path.lexists(file)]
    if there and not overwrite:
        raise ValueError(
            f"out: {there[0]} is there already; choose another folder, or ask to overwrite it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in files.items():
        if to == "netcdf":
            _write_netcdf(run, name, file)
        else:
            write_durable(file, _as_bytes(run, name, to))
    return list(files.values())


def _as_bytes(run: Run, name: str, to: str) -> bytes:
    import pyarrow as pa
    import pyarrow.csv

    from esscher.runs.tables import encode_table

    table = run.arrow(name)
    if to == "parquet":
        return encode_table(table, {**run.manifest.header, "table": name})
    if to == "json":
        return json.dumps(plain(table.to_pylist()), indent=1, ensure_ascii=False).encode() + b"\n"
    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(table, sink)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _write_netcdf(run: Run, name: str, file: Path) -> None:
    try:
        xarray: Any = importlib.import_module("xarray")
    except ImportError as cause:
        raise RunError(
            "xarray is not installed; install it with: pip install 'esscher[netcdf]'"
        ) from cause
    dataset = xarray.Dataset.from_dataframe(run.table(name).rename_axis("row"))
    dataset.attrs = {
        "job": run.manifest.job,
        "spec": canonical_json(run.spec),
        "spec_hash": run.manifest.spec_hash,
    }
    dataset.to_netcdf(file)


# ---- Whether a folder is free for a run.


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
        with disk_errors(path):
            raise OSError(errno.EROFS if read_only else errno.EACCES, "")
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
