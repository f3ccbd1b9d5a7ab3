"""A stored run as tables. Reading needs neither the job's code nor torch."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esscher.runs.errors import RunError, one_line, resume_command
from esscher.runs.lock import holder_of
from esscher.runs.manifest import MANIFEST, Failure, Manifest, Status, read_manifest
from esscher.runs.progress import Progress
from esscher.runs.store import Store
from esscher.runs.survey import read_group

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
    "budget": "esscher.probe.budget:run_budget",
}
"""Name of a view -> "module:function" of a function of a run, or of what else shows itself."""


def find_view(name: str) -> Callable[..., Any]:
    module, _, attribute = VIEWS[name].partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found


# ---- A stored run as tables. Reading needs neither the job's code nor torch.

LOCK = "lock"
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
        holder = holder_of(self.path / LOCK)
        if holder is not None and holder.is_alive() is not False:
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
        ended = self.status != "running"
        return Progress(
            Store(self.path).count(self.manifest.units),
            self.manifest.units,
            failed=len(self.failures),
            ended=ended,
        )

    @property
    def tables(self) -> list[str]:
        """Names of the final tables."""
        return sorted(self.manifest.tables)

    def arrow(self, name: str) -> pa.Table:
        """A final table as Arrow, its checksum verified."""
        if name not in self.manifest.tables:
            raise ValueError(self._no_table(name))
        return Store(self.path).read_table(
            name, self.manifest.spec_hash, self.manifest.checksums.get(name)
        )

    def table(self, name: str) -> Any:
        """A final table as a pandas frame, its checksum verified."""
        return self.arrow(name).to_pandas()

    def columns(self, name: str) -> dict[str, Column]:
        """What the columns of a table are, in their order; before there are tables, of the rows
        there are.
        """
        from esscher.runs.columns import columns_of

        return columns_of((self.arrow(name) if self.tables else self._finished(name)).schema)

    def partial(self, name: str) -> Any:
        """Rows of the units finished so far, in the order of units and before consolidation, as a
        pandas frame.
        """
        return self._finished(name).to_pandas()

    def _finished(self, name: str) -> pa.Table:
        from esscher.runs.tables import concatenate

        store, spec_hash = Store(self.path), self.manifest.spec_hash
        indices = store.indices(self.manifest.units)
        found = concatenate(
            None, [store.read_shard(index, spec_hash=spec_hash) for index in indices]
        )
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

    def _no_table(self, name: str) -> str:
        if self.tables:
            return f"{self.path}: no table {name!r}; there are: {', '.join(self.tables)}"
        progress = self.progress
        return (
            f"{self.path}: no tables yet, {progress.done} of {progress.total} units are done"
            f" ({self.status}); {resume_command(self.path)} completes it, and partial({name!r})"
            " shows what there is"
        )


def load_run(path: str | os.PathLike[str]) -> Run:
    """A stored run, finished or not."""
    return Run(Path(path), read_manifest(Path(path)))


def list_runs(folder: str | os.PathLike[str] = ".") -> list[Run]:
    """The runs in a folder, those of groups in it too, oldest first; what cannot be read is named
    in the log and left out.
    """
    root = Path(folder)
    if not root.is_dir():
        raise RunError(f"{root}: no such folder")
    runs = []
    for path in sorted(root.iterdir()):
        try:
            for name in read_group(path) or ("",):
                if os.path.lexists(path / name / MANIFEST) or Store(path / name).count():
                    runs.append(load_run(path / name))
        except RunError as cause:
            _log.warning("%s", one_line(str(cause)))
    return sorted(runs, key=lambda run: run.manifest.started)
