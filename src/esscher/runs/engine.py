"""Run a spec to its tables, or go on where a run stopped: finished units are neither done again nor
lost.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
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
from esscher.runs.executors import Cluster, Executor, InProcess, Order, Outcome, Processes, describe
from esscher.runs.job import entry_of, find_job, read_spec, units_of
from esscher.runs.lock import held
from esscher.runs.manifest import (
    MANIFEST,
    Failure,
    Manifest,
    Start,
    Status,
    commit,
    machine,
    now,
    read_manifest,
    versions,
)
from esscher.runs.progress import Report, Tracker
from esscher.runs.run import LOCK, Run, load_run
from esscher.runs.spec import RunSpec
from esscher.runs.store import Store
from esscher.runs.survey import Found, refuse_foreign, survey
from esscher.runs.tables import as_tables

_SILENCE = 2.0  # seconds
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
        units_of(job, whole)  # what leaves no unit is refused before there is a folder
    return _run(Path(out), whole, workers, dask, progress, tries)


def resume(
    path: str | os.PathLike[str],
    *,
    workers: int = 1,
    dask: str | None = None,
    progress: Report | None = None,
    tries: int = 3,
) -> Run:
    """Complete a run: finished units are skipped, failed ones tried again, damaged shards done
    again and named.

    A lost or truncated manifest is written again from the shards.
    """
    Store(Path(path)).refuse_link()
    if not os.path.lexists(Path(path) / MANIFEST) and Store(Path(path)).count() == 0:
        # raises: there is nothing to go on with, so nothing may be made here
        read_manifest(Path(path))
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
        store.sweep()
        found = survey(store, spec)
        costs = {index: found.job.cost(found.spec, found.units[index]) for index in found.pending}
        tracker = Tracker(progress, costs, len(found.units))
        with tracker:
            for note in found.notes:
                tracker.say(note)
            if _is_finished(store, found):
                return load_run(path)
            executor = (
                f"dask {dask}"
                if dask
                else f"{workers} processes"
                if workers > 1
                else "this process"
            )
            store.remove_page()
            log = _Log(store, _begun(found, executor))
            with _ended(log, len(found.units)):
                if found.pending:
                    order = Order(entry_of(found.job.name), log.manifest.header)
                    with _executor(order, path, workers, dask, len(found.pending)) as where:
                        _compute(found, where, log, tracker, tries)
                with _patience(tracker):
                    tables, checksums = _consolidate(store, found, log.manifest)
                log.end(
                    "incomplete" if log.failures else "complete", tables=tables, checksums=checksums
                )
        run = load_run(path)
    if run.failures:
        raise RunIncomplete(run)
    return run


@contextlib.contextmanager
def _patience(tracker: Tracker) -> Iterator[None]:
    """Say that the final tables are being made, when that takes longer than people like to wait in
    silence.
    """
    if tracker.quiet:
        yield
        return
    timer = threading.Timer(_SILENCE, tracker.say, ["all units are done; making the final tables"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_finished(store: Store, found: Found) -> bool:
    """Whether all is done and sound, so that nothing need be touched."""
    if found.pending or found.previous is None or found.previous.status != "complete":
        return False
    try:
        for name in found.previous.tables:
            store.read_table(name, found.spec.hash, found.previous.checksums.get(name))
    except Damaged:
        return False
    return True


def _executor(order: Order, path: Path, workers: int, dask: str | None, pending: int) -> Executor:
    if dask is not None:
        return Cluster(order, dask, workers)
    return Processes(order, path, min(workers, pending)) if workers > 1 else InProcess(order)


def _begun(found: Found, executor: str) -> Manifest:
    start = Start(
        started=now(), executor=executor, machine=machine(), versions=versions(), commit=commit()
    )
    if found.previous is None:
        manifest = Manifest.begin(found.spec, found.units, found.hashes, start)
    else:
        manifest = found.previous.replaced(
            status="running",
            ended=None,
            failures=(),
            stopped=None,
            tables={},
            checksums={},
            starts=(*found.previous.starts, start),
        )
    return manifest.replaced(notes=(*manifest.notes, *found.notes))


class _Log:
    """The manifest on the disk while the run goes on."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store, self.manifest = store, manifest
        self.failures: list[Failure] = []
        self._write()

    def fail(self, failure: Failure) -> None:
        self.failures.append(failure)
        if time.monotonic() - self._written > _MANIFEST_SECONDS:
            self.manifest = self.manifest.replaced(failures=tuple(self.failures))
            self._write()

    def end(
        self,
        status: Status,
        *,
        tables: dict[str, int] | None = None,
        checksums: dict[str, str] | None = None,
        stopped: str | None = None,
    ) -> None:
        failures = tuple(sorted(self.failures, key=lambda failure: failure.index))
        self.store.settle()
        ended = {"status": status, "ended": now(), "failures": failures, "stopped": stopped}
        self.manifest = self.manifest.replaced(
            **ended, tables=tables or {}, checksums=checksums or {}
        )
        self._write()

    def _write(self) -> None:
        self.manifest.write(self.store)
        self._written = time.monotonic()


@contextlib.contextmanager
def _ended(log: _Log, total: int) -> Iterator[None]:
    """Whatever stops a run is written down if the disk allows, and raised with the command to go
    on.
    """
    # counted on the disk: Ctrl-C may come right after a rename
    path, count = log.store.path, log.store.count
    try:
        yield
    except KeyboardInterrupt as cause:
        with contextlib.suppress(StoreError):
            log.end("incomplete", stopped="stopped by Ctrl-C")
        raise RunInterrupted(path, count(), total) from cause
    except RunError as cause:
        with contextlib.suppress(StoreError):
            log.end("incomplete", stopped=str(cause))
        kept = (
            f"the {count()} of {total} units that are finished are kept. To go on:"
            f" {resume_command(path)}"
        )
        raise type(cause)(f"{cause}; {kept}") from cause
    except Exception as cause:
        with contextlib.suppress(StoreError):
            log.end("failed", stopped=describe(cause)[0])
        raise


def _compute(found: Found, executor: Executor, log: _Log, tracker: Tracker, tries: int) -> None:
    """Do the pending units, each as often as it may fail."""
    executor.heard = lambda index, share: tracker.hear(index, share, executor.pids())
    for index in found.pending:
        executor.submit(index, found.units[index])
    failed: Counter[int] = Counter()
    left = len(found.pending)
    while left:
        outcome = executor.next()
        if outcome is None:
            tracker.tick(executor.pids())
            continue
        if outcome.reason is None:
            if outcome.data is not None:
                log.store.write_shard(outcome.index, outcome.data)
            tracker.end(outcome.index)
            left -= 1
        else:
            failed[outcome.index] += 1
            if failed[outcome.index] < tries:
                tracker.again(outcome.index)
                executor.submit(outcome.index, found.units[outcome.index])
            else:
                _give_up(found, outcome, log, tracker, tries)
                left -= 1
        tracker.tick(executor.pids())


def _give_up(found: Found, outcome: Outcome, log: _Log, tracker: Tracker, tries: int) -> None:
    assert outcome.reason is not None
    unit = found.units[outcome.index]
    tracker.end(outcome.index, failed=True)
    tracker.say(f"unit {outcome.index} {unit} failed {tries} times: {outcome.reason}")
    failure = Failure(
        index=outcome.index,
        unit=unit,
        reason=outcome.reason,
        tries=tries,
        traceback=outcome.traceback,
    )
    log.fail(failure)


def _consolidate(
    store: Store, found: Found, manifest: Manifest
) -> tuple[dict[str, int], dict[str, str]]:
    """Final tables from the shards there are: their numbers of rows and their checksums."""
    shards = store.stored(found.units, found.spec.hash)
    if not shards:
        return {}, {}
    try:
        tables = declare(
            as_tables(found.job.consolidate(found.spec, shards)), found.job.columns(found.spec)
        )
    except Exception as cause:
        if not found.done or isinstance(cause, RunError):
            raise
        # The shards were there before this start, and may be what nobody computed.
        raise RunError(
            f"{store.path}: the tables cannot be made of its shards ({describe(cause)[0]}); if a"
            f" shard is not this run's own, remove it from {store.shards}"
        ) from cause
    checksums = {
        name: store.write_table(name, table, manifest.header) for name, table in tables.items()
    }
    return {name: table.num_rows for name, table in tables.items()}, checksums
