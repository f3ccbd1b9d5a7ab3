"""Execute a spec, or resume a run: units without a sound shard are computed, then all shards become
the final tables.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esscher.runs.columns import declare
from esscher.runs.errors import (
    Damaged,
    RunError,
    RunIncomplete,
    RunInterrupted,
    StoreError,
    resume_command,
)
from esscher.runs.executors import (
    Outcomes,
    Todo,
    Work,
    compute_here,
    compute_in_processes,
    compute_on_cluster,
    describe,
)
from esscher.runs.progress import Report, Tracker
from esscher.runs.run import (
    LOCK,
    MANIFEST,
    Failure,
    Manifest,
    Run,
    Start,
    Status,
    commit,
    load_run,
    machine,
    now,
    read_manifest,
    refuse_foreign,
    versions,
)
from esscher.runs.spec import (
    RunSpec,
    canonical_json,
    find_job,
    read_spec,
    spec_of,
    units_of,
)
from esscher.runs.store import PAGE, Shards, Store, held, write_durable
from esscher.runs.tables import as_tables

TRIES = 3  # of a unit that fails


def execute(
    spec: RunSpec | Mapping[str, Any] | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    workers: int = 1,
    dask: str | None = None,
    progress: Report | None = None,
    opened: Any = None,
) -> Run:
    """Do every unit of a spec (an object, a mapping, or a YAML file) and store the tables in the
    folder ``out``; a folder that holds part of this very run is completed.

    ``opened``: the result of the job's ``open`` for this spec, if the caller has it already.
    ``workers``: number of local processes (1: this process). ``dask``: address of a cluster,
    "tcp://host:port". ``progress`` is called
    with a Progress after each unit. RunIncomplete is raised where a unit failed three times,
    RunInterrupted by Ctrl-C.
    """
    given = spec if isinstance(spec, RunSpec) else read_spec(spec)
    job = find_job(given.job)
    refuse_foreign(Path(out))
    job.check(given)
    context = job.open(given) if opened is None else opened
    units_of(job, context)  # a spec without units is refused before there is a folder
    return _run(Path(out), context, workers, dask, progress)


def resume(
    path: str | os.PathLike[str],
    *,
    workers: int = 1,
    dask: str | None = None,
    progress: Report | None = None,
) -> Run:
    """Complete a run: finished units are skipped, failed ones tried again, damaged shards computed
    again and named.
    """
    manifest = read_manifest(Path(path))
    spec = read_spec(manifest.spec)
    if spec.hash != manifest.spec_hash:
        raise RunError(
            f"{path}: this esscher reads the spec of the run differently; use the version that"
            " began it"
        )
    job = find_job(spec.job)
    job.check(spec)
    return _run(Path(path), job.open(spec), workers, dask, progress)


def _run(
    path: Path,
    context: Any,
    workers: int,
    dask: str | None,
    progress: Report | None,
) -> Run:
    if not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers: expected a whole number of at least 1, got {workers!r}")
    store = Store(path)
    store.create()
    with held(path / LOCK):
        store.clean()
        writer = _Writer(store, context, progress)
        tracker = writer.tracker
        try:
            tracker.tick()
            for note in writer.notes:
                tracker.say(note)
            if not writer.is_finished():
                writer.write(workers, dask)
        finally:
            tracker.tick(ended=True)
        run = load_run(path)
    if run.failures:
        raise RunIncomplete(run)
    return run


def _check_same_run(path: Path, previous: Manifest, spec: RunSpec) -> None:
    """Refuse a folder whose run has another spec."""
    here, there = spec.as_dict(), previous.spec
    differing = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
    if differing:
        found = ", ".join(
            f"{name} is {canonical_json(there.get(name))} there" for name in differing
        )
        raise RunError(f"{path}: holds another run: {found}; choose another folder")


def _check_unchanged(path: Path, previous: Manifest, hashes: dict[str, str]) -> list[str]:
    """Refuse a run whose model or data changed; a note where versions of packages did."""
    names = sorted({*previous.hashes, *hashes})
    changed = [name for name in names if previous.hashes.get(name) != hashes.get(name)]
    if changed:
        raise RunError(
            f"{path}: its {', '.join(changed)} changed since it began; restore it, or start a"
            " new run"
        )
    before = previous.starts[-1].versions
    other = [
        f"{name} {version}, before {before.get(name)}"
        for name, version in versions().items()
        if version != before.get(name)
    ]
    told = f"goes on with other versions, so bits may differ: {'; '.join(other)}"
    return [told] if other else []


# ---- Computing what is missing


class _Writer:
    """A run on the disk: computes pending units, makes tables, keeps the manifest."""

    def __init__(self, store: Store, context: Any, progress: Report | None) -> None:
        """``context``: what the job opened. Damaged shards are removed and named."""
        self.store, self.context, self.spec = store, context, spec_of(context)
        self.failures: list[Failure] = []
        self.notes: list[str] = []
        self.job = find_job(self.spec.job)
        self.units = units_of(self.job, context)
        self.hashes = {name: str(value) for name, value in self.job.hashes(context).items()}
        self.previous: Manifest | None = None
        if (store.path / MANIFEST).exists():
            self.previous = read_manifest(store.path)
            _check_same_run(store.path, self.previous, self.spec)
            self.notes += _check_unchanged(store.path, self.previous, self.hashes)
        self.pending = self._find_pending()
        costs = {index: self.job.cost(context, self.units[index]) for index in self.pending}
        self.tracker = Tracker(progress, costs, len(self.units))

    def _find_pending(self) -> list[int]:
        """Units without a sound shard; a note for each shard that was removed."""
        pending = set(range(len(self.units)))
        for index in self.store.indices(len(self.units)):
            path = self.store.shard_path(index)
            try:
                self.store.read_shard(index, self.spec.hash)
            except Damaged as cause:
                path.unlink()
                self.notes.append(f"{cause}; its unit is computed again")
            else:
                pending.remove(index)
        return sorted(pending)

    def is_finished(self) -> bool:
        """Whether all is done and sound, so that nothing need be touched."""
        if self.pending or self.previous is None or self.previous.status != "complete":
            return False
        try:
            for name in self.previous.tables:
                self.store.read_table(name, self.previous.checksums[name])
        except Damaged:
            return False
        return True

    def write(self, workers: int, dask: str | None) -> None:
        """Compute and store; what stops it is written down and raised with the command to go on."""
        path, total = self.store.path, len(self.units)
        (path / PAGE).unlink(missing_ok=True)  # it will be out of date
        self._begin(f"dask {dask}" if dask else f"{workers} processes" if workers > 1 else "")
        try:
            todo = deque((index, self.units[index]) for index in self.pending)
            if todo:
                work, tracker = Work(self.job, self.context, self.manifest.header), self.tracker
                if dask is not None:
                    outcomes = compute_on_cluster(work, todo, dask)
                elif workers > 1:
                    outcomes = compute_in_processes(work, todo, tracker, workers)
                else:
                    outcomes = compute_here(work, todo, tracker)
                with contextlib.closing(outcomes):
                    self._compute(todo, outcomes)
            self._consolidate()
        except KeyboardInterrupt as cause:
            self._stop("incomplete", "stopped by Ctrl-C")
            # counted on the disk: Ctrl-C may come right after a rename
            raise RunInterrupted(path, self.store.count(), total) from cause
        except RunError as cause:
            self._stop("incomplete", str(cause))
            raise type(cause)(
                f"{cause}; the {self.store.count()} of {total} units that are finished are kept."
                f" To go on: {resume_command(path)}"
            ) from cause
        except Exception as cause:
            self._stop("failed", describe(cause))
            raise

    def _compute(self, todo: Todo, outcomes: Outcomes) -> None:
        """Do the pending units, each as often as it may fail."""
        tracker, failed = self.tracker, Counter[int]()
        for outcome in outcomes:
            if outcome is None:
                tracker.tick()
                continue
            index, unit, reason = outcome.index, self.units[outcome.index], outcome.reason
            failed[index] += reason is not None
            if reason is None:
                write_durable(self.store.shard_path(index), outcome.data)
                tracker.end(index)
            elif failed[index] < TRIES:
                tracker.again(index)
                todo.append((index, unit))
            else:
                tracker.end(index, failed=True)
                tracker.say(f"unit {index} {unit} failed {TRIES} times: {reason}")
                told = {"reason": reason, "traceback": outcome.traceback}
                self.failures.append(Failure(index=index, unit=unit, **told))
            tracker.tick()

    def _consolidate(self) -> None:
        """Make the final tables from the shards there are."""
        store = self.store
        shards = Shards(store, len(self.units), self.spec.hash)
        made = self.job.consolidate(self.context, shards) if shards else {}
        tables = declare(as_tables(made), self.job.columns(self.spec))
        header = self.manifest.header
        checksums = {name: store.write_table(name, table, header) for name, table in tables.items()}
        rows = {name: table.num_rows for name, table in tables.items()}
        status: Status = "incomplete" if self.failures else "complete"
        self._end(status, tables=rows, checksums=checksums)

    def _begin(self, executor: str) -> None:
        start = Start(
            started=now(),
            executor=executor or "this process",
            machine=machine(),
            versions=versions(),
            commit=commit(),
        )
        given = self.spec, self.units, self.hashes, start
        self.manifest = Manifest.begin(*given, before=self.previous, notes=self.notes)
        self.manifest.write(self.store)

    def _stop(self, status: Status, stopped: str) -> None:
        with contextlib.suppress(StoreError):
            self._end(status, stopped=stopped)

    def _end(self, status: Status, **changes: Any) -> None:
        failures = tuple(sorted(self.failures, key=lambda failure: failure.index))
        changes |= {"status": status, "ended": now(), "failures": failures}
        self.manifest = self.manifest.model_copy(update=changes)
        self.manifest.write(self.store)
