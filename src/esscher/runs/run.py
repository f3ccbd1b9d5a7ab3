"""Run directories: a stored run as tables, and export for other tools. Reading needs neither the
job's code nor torch.
"""

from __future__ import annotations

import errno
import importlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from esscher.runs.errors import Damaged, RunError, one_line, plain, resume_command
from esscher.runs.files import ENDINGS, disk_error, write_durable
from esscher.runs.lock import is_held
from esscher.runs.manifest import LOCK, MANIFEST, Failure, Manifest, Status, read_manifest
from esscher.runs.progress import Progress
from esscher.runs.spec import RunSpec, canonical_json
from esscher.runs.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

    from esscher.runs.columns import Column

VIEWS: dict[str, str] = {
    "plot_curve": "esscher.report.run_figures:plot_curve",
    "plot_map": "esscher.report.run_figures:plot_map",
    "plot_rates": "esscher.report.run_figures:plot_rates",
    "plot_error": "esscher.report.figures:plot_alone",
    "html": "esscher.report.summary:html_summary",
    "text": "esscher.report.summary:text_summary",
    "budget": "esscher.probe.budget:budget_of",
}
"""Name of a view -> "module:function" of a function of a run, or of what else shows itself."""


def find_view(name: str) -> Callable[..., Any]:
    module, _, attribute = VIEWS[name].partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found


_log = logging.getLogger("esscher.runs")


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

    def plot_rates(
        self, against: str = "horizon2", *, metric: str | None = None, ax: Any = None
    ) -> Any:
        """Measured exponents with theory, of a probe or of one error of a sweep; returns the
        matplotlib axes.
        """
        return find_view("plot_rates")(self, against, metric=metric, ax=ax)

    def summary(self) -> str:
        """What the run is, how far it got, what it found and its tables, in a few lines."""
        return str(find_view("text")(self))

    def budget(
        self, epsilon: float | None = None, *, total: int | None = None, rule: str | None = None
    ) -> Any:
        """Keys that a keep rule needs in each cache of a probe, for an error (0.1 unless told) or
        of a total.

        ``rule``: one that the run measured; random keys when left out. The answer, that of
        ``esscher budget``, has tables ``heads``, ``caches`` and ``totals``.
        """
        return find_view("budget")(self, epsilon, total, rule)

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
