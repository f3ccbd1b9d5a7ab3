"""Run a spec to its tables, or go on where a run stopped: finished units are neither computed again
nor lost.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterable, Mapping
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
    Outcome,
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
    load_run,
    now,
    read_manifest,
    refuse_foreign,
    refuse_other,
    versions,
)
from esscher.runs.spec import (
    RunSpec,
    Unit,
    digest,
    find_job,
    read_spec,
    spec_of,
    units_of,
)
from esscher.runs.store import Shards, Store, held
from esscher.runs.tables import as_tables

_SILENCE = 2.0  # seconds of making the final tables after which a message says so
_MANIFEST_SECONDS = 5.0  # while units fail, the manifest is written again at most so often


def execute(
    spec: RunSpec | Mapping[str, Any] | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    workers: int = 1,
    dask: str | None = None,
    progress: Report | None = None,
    tries: int = 3,
    opened: Any = None,
) -> Run:
    """Do every unit of a spec (an object, a mapping, or a YAML file) and store the tables in the
    folder ``out``.

    ``opened``: what the job's ``open`` made of this spec, where that is done already. ``workers``
    local processes (1: this process), or a Dask cluster: "tcp://host:port", or "local"
    for one of ``workers`` processes. The tables are the same, bit for bit. ``progress`` is called
    with a Progress after each unit. A unit that fails ``tries`` times is recorded, and
    RunIncomplete is raised once the others are done. Ctrl-C raises RunInterrupted. A folder that
    holds part of this very run is completed; one that holds another is refused.
    """
    given = spec if isinstance(spec, RunSpec) else read_spec(spec)
    job = find_job(given.job)
    if not isinstance(given, job.spec):
        raise ValueError(
            f"spec: job {job.name} expects a {job.spec.__name__}, got a {type(given).__name__}"
        )
    refuse_foreign(Path(out))
    job.check(given)
    context = job.open(given) if opened is None else opened
    if not os.path.lexists(out):
        units_of(job, context)  # a spec without units is refused before there is a folder
    return _run(Path(out), context, workers, dask, progress, tries)


def resume(
    path: str | os.PathLike[str],
    *,
    workers: int = 1,
    dask: str | None = None,
    progress: Report | None = None,
    tries: int = 3,
) -> Run:
    """Complete a run: finished units are skipped, failed ones tried again, damaged shards computed
    again and named.

    A lost or truncated manifest is written again from the shards.
    """
    Store(Path(path)).refuse_link()
    if not os.path.lexists(Path(path) / MANIFEST) and Store(Path(path)).count() == 0:
        read_manifest(Path(path))  # raises: there is nothing to go on with
    return _run(Path(path), None, workers, dask, progress, tries)


def _run(
    path: Path,
    context: Any,
    workers: int,
    dask: str | None,
    progress: Report | None,
    tries: int,
) -> Run:
    for name, value in (("workers", workers), ("tries", tries)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")
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
                writer.write(workers, dask, tries)
        finally:
            tracker.tick(ended=True)
        run = load_run(path)
    if run.failures:
        raise RunIncomplete(run)
    return run


# ---- What a run directory already holds


def _recorded_spec(store: Store, previous: Manifest | None) -> RunSpec:
    """The spec as the manifest has it, or any sound shard."""
    header = None if previous is None else previous.header
    for index in store.indices() if header is None else ():
        with contextlib.suppress(Damaged):
            header = store.read_shard_header(index)
            break
    if header is None:
        raise Damaged(
            f"{store.path}: no manifest and no sound shard, so the run cannot be known; start it"
            " again"
        )
    spec = read_spec(header["spec"])
    if spec.hash != header["spec_hash"]:
        raise RunError(
            f"{store.path}: this esscher reads the spec of the run differently; use the version"
            " that began it"
        )
    return spec


def _check_unchanged(
    path: Path, previous: Manifest, units: list[Unit], hashes: dict[str, str]
) -> list[str]:
    """Refuse a run whose units or data changed; a note where versions of packages did."""
    if previous.units_hash != digest(units):
        raise RunError(
            f"{path}: began with other units than its job now lists; use the esscher that began it,"
            " or start a new run"
        )
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
    """A run as it is on the disk: computes the pending units, makes the tables, and keeps the
    manifest up to date.
    """

    def __init__(self, store: Store, context: Any, progress: Report | None) -> None:
        """``context``: what the job opened; None for whichever run it is. Damaged shards are
        removed and named.
        """
        self.store, self.failures = store, list[Failure]()
        self.notes: list[str] = []
        self.previous: Manifest | None = None
        try:
            self.previous = read_manifest(store.path)
        except Damaged as cause:
            if store.count() or os.path.lexists(store.path / MANIFEST):
                self.notes.append(f"{cause}: done now")
        self.spec = _recorded_spec(store, self.previous) if context is None else spec_of(context)
        if self.previous is not None and self.previous.spec_hash != self.spec.hash:
            refuse_other(store.path, self.previous, self.spec)
        self.job = find_job(self.spec.job)
        if context is None:
            self.job.check(self.spec)
            context = self.job.open(self.spec)
        self.context = context
        self.units = units_of(self.job, context)
        self.hashes = {name: str(value) for name, value in self.job.hashes(context).items()}
        if self.previous is not None:
            self.notes += _check_unchanged(store.path, self.previous, self.units, self.hashes)
        self.pending = self._find_pending()
        costs = {index: self.job.cost(context, self.units[index]) for index in self.pending}
        self.tracker = Tracker(progress, costs, len(self.units))

    def _find_pending(self) -> list[int]:
        """Units without a sound shard; a note for each file that was not one."""
        done: set[int] = set()
        self.notes += [
            f"{name}: not a shard of this run; left alone, and none of it is in the tables"
            for name in self.store.strays(len(self.units))
        ]
        for index in self.store.indices(len(self.units)):
            path = self.store.shard_path(index)
            try:
                header = self.store.read_shard_header(index)
                run = (header["job"], header["spec_hash"], header["hashes"])
                if run != (self.spec.job, self.spec.hash, self.hashes):
                    if self.previous is None:  # no manifest says whose shards these are
                        raise RunError(
                            f"{path}: belongs to another run, or to one on other data; choose"
                            " another folder"
                        )
                    raise Damaged(f"{path}: damaged: belongs to another run")
                if header["index"] != index or header["unit"] != self.units[index]:
                    raise Damaged(f"{path}: damaged: holds another unit than its name says")
            except Damaged as cause:
                self.store.remove_shard(index)
                self.notes.append(f"{cause}; its unit is computed again")
            else:
                done.add(index)
        return [index for index in range(len(self.units)) if index not in done]

    def is_finished(self) -> bool:
        """Whether all is done and sound, so that nothing need be touched."""
        if self.pending or self.previous is None or self.previous.status != "complete":
            return False
        try:
            for name in self.previous.tables:
                self.store.read_table(name, self.spec.hash, self.previous.checksums.get(name))
        except Damaged:
            return False
        return True

    def write(self, workers: int, dask: str | None, tries: int) -> None:
        """Compute and store; whatever stops it is written down if the disk allows, and raised with
        the command to go on.
        """
        self.store.remove_page()
        self._begin(f"dask {dask}" if dask else f"{workers} processes" if workers > 1 else "")
        path, total = self.store.path, len(self.units)
        try:
            todo = deque((index, self.units[index]) for index in self.pending)
            if todo:
                with contextlib.closing(self._outcomes(todo, workers, dask)) as outcomes:
                    self._compute(todo, outcomes, tries)
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

    def _outcomes(
        self, todo: Todo, workers: int, dask: str | None
    ) -> Generator[Outcome | None, None, None]:
        work = Work(self.job, self.context, self.manifest.header)
        if dask is not None:
            yield from compute_on_cluster(work, todo, self.tracker, dask, workers)
        elif workers > 1:
            yield from compute_in_processes(work, todo, self.tracker, self.store.path, workers)
        else:
            yield from compute_here(work, todo, self.tracker)

    def _compute(self, todo: Todo, outcomes: Iterable[Outcome | None], tries: int) -> None:
        """Do the pending units, each as often as it may fail."""
        tracker, failed = self.tracker, Counter[int]()
        for outcome in outcomes:
            if outcome is None:
                tracker.tick()
                continue
            index, unit, reason = outcome.index, self.units[outcome.index], outcome.reason
            failed[index] += reason is not None
            if reason is None:
                if outcome.data is not None:
                    self.store.write_shard(index, outcome.data)
                tracker.end(index)
            elif failed[index] < tries:
                tracker.again(index)
                todo.append((index, unit))
            else:
                tracker.end(index, failed=True)
                tracker.say(f"unit {index} {unit} failed {tries} times: {reason}")
                trace = outcome.traceback
                self.failures.append(
                    Failure(index=index, unit=unit, reason=reason, tries=tries, traceback=trace)
                )
                if time.monotonic() - self._saved > _MANIFEST_SECONDS:
                    self._save(self.manifest.replaced(failures=tuple(self.failures)))
            tracker.tick()

    def _consolidate(self) -> None:
        """Make the final tables from the shards there are."""
        store = self.store
        message = "all units are done; making the final tables"
        timer = threading.Timer(_SILENCE, self.tracker.tick, kwargs={"message": message})
        timer.daemon = True
        timer.start()
        try:
            shards = Shards(store, self.units, self.spec.hash)
            made = self.job.consolidate(self.context, shards) if shards else {}
            tables = declare(as_tables(made), self.job.columns(self.spec))
        except Exception as cause:
            if len(self.pending) == len(self.units) or isinstance(cause, RunError):
                raise
            # The shards were there before this start, and may not be the run's own.
            raise RunError(
                f"{store.path}: the tables cannot be made of its shards ({describe(cause)}); if a"
                f" shard is not this run's own, remove it from {store.shards}"
            ) from cause
        finally:
            timer.cancel()
        header = self.manifest.header
        checksums = {name: store.write_table(name, table, header) for name, table in tables.items()}
        rows = {name: table.num_rows for name, table in tables.items()}
        status: Status = "incomplete" if self.failures else "complete"
        self._end(status, tables=rows, checksums=checksums)

    def _begin(self, executor: str) -> None:
        start = Start.here(executor or "this process")
        if self.previous is None:
            manifest = Manifest.begin(self.spec, self.units, self.hashes, start)
        else:
            manifest = self.previous.replaced(
                status="running",
                ended=None,
                failures=(),
                stopped=None,
                tables={},
                checksums={},
                starts=(*self.previous.starts, start),
            )
        self._save(manifest.replaced(notes=(*manifest.notes, *self.notes)))

    def _stop(self, status: Status, stopped: str) -> None:
        with contextlib.suppress(StoreError):
            self._end(status, stopped=stopped)

    def _end(self, status: Status, **changes: Any) -> None:
        failures = tuple(sorted(self.failures, key=lambda failure: failure.index))
        self._save(self.manifest.replaced(status=status, ended=now(), failures=failures, **changes))

    def _save(self, manifest: Manifest) -> None:
        manifest.write(self.store)
        self.manifest, self._saved = manifest, time.monotonic()
