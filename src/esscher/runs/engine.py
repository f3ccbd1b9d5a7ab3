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
from dataclasses import dataclass
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
    compute_here,
    compute_in_processes,
    compute_on_cluster,
    describe,
)
from esscher.runs.lock import held
from esscher.runs.manifest import (
    LOCK,
    MANIFEST,
    Failure,
    Manifest,
    Start,
    Status,
    now,
    read_manifest,
    versions,
)
from esscher.runs.progress import Report, Tracker
from esscher.runs.run import Run, load_run, refuse_foreign, refuse_other
from esscher.runs.spec import (
    JOBS,
    Job,
    RunSpec,
    Unit,
    canonical_json,
    digest,
    find_job,
    read_spec,
    units_of,
)
from esscher.runs.store import Store
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
) -> Run:
    """Do every unit of a spec (an object, a mapping, or a YAML file) and store the tables in the
    folder ``out``.

    ``workers`` local processes (1: this process), or a Dask cluster: "tcp://host:port", or "local"
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
    whole: RunSpec = job.concrete(given)
    if not os.path.lexists(out):
        units_of(job, whole)  # a spec without units is refused before there is a folder
    return _run(Path(out), whole, workers, dask, progress, tries)


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
    spec: RunSpec | None,
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
        plan = _plan(store, spec)
        costs = {index: plan.job.cost(plan.spec, plan.units[index]) for index in plan.pending}
        tracker = Tracker(progress, costs, len(plan.units))
        try:
            tracker.tick()
            for note in plan.notes:
                tracker.say(note)
            if not plan.is_finished(store):
                _Writer(store, plan, tracker).write(workers, dask, tries)
        finally:
            tracker.tick(ended=True)
        run = load_run(path)
    if run.failures:
        raise RunIncomplete(run)
    return run


# ---- What a run directory already holds


@dataclass(frozen=True)
class _Plan:
    """A run as it is on the disk: what is to be computed follows from it."""

    job: Job
    spec: RunSpec
    units: list[Unit]
    hashes: dict[str, str]
    previous: Manifest | None
    pending: list[int]
    notes: tuple[str, ...]

    def is_finished(self, store: Store) -> bool:
        """Whether all is done and sound, so that nothing need be touched."""
        if self.pending or self.previous is None or self.previous.status != "complete":
            return False
        try:
            for name in self.previous.tables:
                store.read_table(name, self.spec.hash, self.previous.checksums.get(name))
        except Damaged:
            return False
        return True


def _plan(store: Store, spec: RunSpec | None) -> _Plan:
    """What there is of the run of ``spec``, or of whichever run it is. Damaged shards are removed
    and named.
    """
    notes: list[str] = []
    try:
        previous: Manifest | None = read_manifest(store.path)
    except Damaged as cause:
        previous = None
        if store.count() or os.path.lexists(store.path / MANIFEST):
            notes.append(f"{cause}: done now")
    if spec is None:
        spec = _recorded_spec(store, previous)
    elif previous is not None and previous.spec_hash != spec.hash:
        refuse_other(store.path, previous, spec)
    job = find_job(spec.job)
    units = units_of(job, spec)
    hashes = {name: str(value) for name, value in job.hashes(spec).items()}
    if previous is not None:
        notes += _check_unchanged(store.path, previous, units, hashes)
    pending, damaged = _pending(store, spec, units, hashes, known=previous is not None)
    return _Plan(job, spec, units, hashes, previous, pending, (*notes, *damaged))


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
    if not other:
        return []
    return [f"goes on with other versions, so bits may differ: {'; '.join(other)}"]


def _pending(
    store: Store, spec: RunSpec, units: list[Unit], hashes: dict[str, str], *, known: bool
) -> tuple[list[int], list[str]]:
    """Units without a sound shard, and a line for each file that was not one. ``known``: a manifest
    says whose shards these are.
    """
    done: set[int] = set()
    notes = [
        f"{name}: not a shard of this run; left alone, and none of it is in the tables"
        for name in store.strays(len(units))
    ]
    for index in store.indices(len(units)):
        path = store.shard_path(index)
        try:
            header = store.read_shard_header(index)
            run = (header["job"], header["spec_hash"], header["hashes"])
            if run != (spec.job, spec.hash, hashes):
                if not known:
                    raise RunError(
                        f"{path}: belongs to another run, or to one on other data; choose another"
                        " folder"
                    )
                raise Damaged(f"{path}: damaged: belongs to another run")
            if header["index"] != index or header["unit"] != units[index]:
                raise Damaged(f"{path}: damaged: holds another unit than its name says")
        except Damaged as cause:
            store.remove_shard(index)
            notes.append(f"{cause}; its unit is computed again")
        else:
            done.add(index)
    return [index for index in range(len(units)) if index not in done], notes


# ---- Computing what is missing


class _Writer:
    """Computes the pending units of a run, makes its tables, and keeps its manifest up to date."""

    def __init__(self, store: Store, plan: _Plan, tracker: Tracker) -> None:
        self.store, self.plan, self.tracker = store, plan, tracker
        self.failures: list[Failure] = []

    def write(self, workers: int, dask: str | None, tries: int) -> None:
        """Compute and store; whatever stops it is written down if the disk allows, and raised with
        the command to go on.
        """
        self.store.remove_page()
        self._begin(f"dask {dask}" if dask else f"{workers} processes" if workers > 1 else "")
        path, total = self.store.path, len(self.plan.units)
        try:
            todo = deque((index, self.plan.units[index]) for index in self.plan.pending)
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
        order = canonical_json({"entry": JOBS[self.plan.job.name], "header": self.manifest.header})
        if dask is not None:
            yield from compute_on_cluster(order, todo, self.tracker, dask, workers)
        elif workers > 1:
            yield from compute_in_processes(order, todo, self.tracker, self.store.path, workers)
        else:
            yield from compute_here(order, todo, self.tracker)

    def _compute(self, todo: Todo, outcomes: Iterable[Outcome | None], tries: int) -> None:
        """Do the pending units, each as often as it may fail."""
        units, tracker = self.plan.units, self.tracker
        failed: Counter[int] = Counter()
        for outcome in outcomes:
            if outcome is None:
                tracker.tick()
                continue
            index = outcome.index
            failed[index] += outcome.reason is not None
            if outcome.reason is None:
                if outcome.data is not None:
                    self.store.write_shard(index, outcome.data)
                tracker.end(index)
            elif failed[index] < tries:
                tracker.again(index)
                todo.append((index, units[index]))
            else:
                tracker.end(index, failed=True)
                tracker.say(f"unit {index} {units[index]} failed {tries} times: {outcome.reason}")
                self._fail(
                    Failure(
                        index=index,
                        unit=units[index],
                        reason=outcome.reason,
                        tries=tries,
                        traceback=outcome.traceback,
                    )
                )
            tracker.tick()

    def _consolidate(self) -> None:
        """Make the final tables from the shards there are."""
        plan, store = self.plan, self.store
        message = "all units are done; making the final tables"
        timer = threading.Timer(_SILENCE, self.tracker.tick, kwargs={"message": message})
        timer.daemon = True
        timer.start()
        try:
            shards = store.stored(plan.units, plan.spec.hash)
            made = plan.job.consolidate(plan.spec, shards) if shards else {}
            tables = declare(as_tables(made), plan.job.columns(plan.spec))
        except Exception as cause:
            if len(plan.pending) == len(plan.units) or isinstance(cause, RunError):
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
        plan = self.plan
        start = Start.here(executor or "this process")
        if plan.previous is None:
            manifest = Manifest.begin(plan.spec, plan.units, plan.hashes, start)
        else:
            manifest = plan.previous.replaced(
                status="running",
                ended=None,
                failures=(),
                stopped=None,
                tables={},
                checksums={},
                starts=(*plan.previous.starts, start),
            )
        self._save(manifest.replaced(notes=(*manifest.notes, *plan.notes)))

    def _fail(self, failure: Failure) -> None:
        self.failures.append(failure)
        if time.monotonic() - self._saved > _MANIFEST_SECONDS:
            self._save(self.manifest.replaced(failures=tuple(self.failures)))

    def _stop(self, status: Status, stopped: str) -> None:
        with contextlib.suppress(StoreError):
            self._end(status, stopped=stopped)

    def _end(self, status: Status, **changes: Any) -> None:
        failures = tuple(sorted(self.failures, key=lambda failure: failure.index))
        self._save(self.manifest.replaced(status=status, ended=now(), failures=failures, **changes))

    def _save(self, manifest: Manifest) -> None:
        manifest.write(self.store)
        self.manifest, self._saved = manifest, time.monotonic()
