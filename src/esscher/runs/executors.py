"""Where units are computed: in this process, in local processes, or on a Dask cluster.

An executor is a generator: it takes units from the queue ``todo``, to which a failed unit may come
back, and yields an Outcome for each try, or None after about a second without one. Closing it stops
all work; stored shards are kept.

A local worker is a fresh process at the other end of a pipe. It ends when its parent does.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import multiprocessing
import os
import queue
import secrets
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

from esscher.runs.columns import declare
from esscher.runs.errors import RunError
from esscher.runs.progress import Tracker, advancing
from esscher.runs.run import versions
from esscher.runs.spec import JOBS, Job, Unit, canonical_json, find_job, spec_of
from esscher.runs.tables import as_tables, encode_shard

Todo = deque[tuple[int, Unit]]
Outcomes = Generator["Outcome | None", None, None]


@dataclass(frozen=True)
class Outcome:
    """Result of one try of a unit: its shard, or why it failed."""

    index: int
    data: bytes = b""
    reason: str | None = None
    traceback: str = ""

    @classmethod
    def failed(cls, index: int, cause: BaseException) -> Outcome:
        trace = "".join(traceback.format_exception(cause))[-4000:]
        return cls(index, b"", describe(cause), trace)


def describe(cause: BaseException) -> str:
    """An exception as one line."""
    text = " ".join(str(cause).split())
    return (f"{type(cause).__name__}: {text}" if text else type(cause).__name__)[:500]


@dataclass(frozen=True)
class Work:
    """What a process needs to compute units; ``context``: what the job opened."""

    job: Job
    context: Any
    header: dict[str, Any]

    @classmethod
    def open(cls, order: str) -> Work:
        """From the JSON that any process can be given."""
        given = json.loads(order)
        header = given["header"]
        job = find_job(header["job"], given["entry"])
        return cls(job, job.open(job.spec.read(header["spec"])), header)

    @property
    def order(self) -> str:
        return canonical_json({"entry": JOBS[self.job.name], "header": self.header})

    def shard(self, index: int, unit: Unit) -> bytes:
        """The shard of one unit, computed in this process with the threads of the spec."""
        spec = spec_of(self.context)
        with _threads(spec.threads):
            tables = self.job.compute(self.context, unit)
        give_back()
        header = {**self.header, "index": index, "unit": unit}
        return encode_shard(declare(as_tables(tables), self.job.columns(spec)), header)


_opened: dict[str, Work] = {}  # in a Dask worker: the run it works on, by its order
_lock = threading.Lock()  # its threads share it


def compute_remotely(order: str, index: int, unit: Unit, expected: dict[str, str]) -> bytes:
    """A shard on another machine, refused with other versions, which could give other bits."""
    here = versions()
    other = [name for name in expected if here.get(name) != expected[name]]
    if other:
        found = ", ".join(f"{name} {here.get(name)} instead of {expected[name]}" for name in other)
        raise RuntimeError(f"the worker has {found}; give it the versions of the client")
    with _lock:
        if order not in _opened:
            _opened.clear()  # not two models in memory
            _opened[order] = Work.open(order)
        work = _opened[order]
    return work.shard(index, unit)


def give_back() -> None:
    """Return freed memory to the system where the C library keeps it, as glibc does: a process then
    holds what it needs, in place of the most that it ever needed.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def _threads(threads: int) -> Iterator[None]:
    """Set torch's threads, where it is loaded: the bits of a parallel sum depend on the number.

    numpy's BLAS and numba read theirs from the environment when they are imported; local workers
    are started with it.
    """
    if (torch := sys.modules.get("torch")) is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compute_here(work: Work, todo: Todo, tracker: Tracker) -> Outcomes:
    """One unit after the other in this process; the other executors give the same bytes."""
    while todo:
        index, unit = todo.popleft()
        try:
            with advancing(functools.partial(tracker.hear, index)):
                outcome = Outcome(index, work.shard(index, unit))
        except (Exception, SystemExit) as cause:
            outcome = Outcome.failed(index, cause)
        yield outcome


# ---- Local processes. A process that dies costs its unit one try and is replaced.

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)


class _Worker:
    """A process, the pipe to it, and the unit it is at."""

    def __init__(self, order: str, limits: dict[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(order, other), daemon=True)
        before = dict(os.environ)
        os.environ.update(limits)
        try:
            self.process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        other.close()
        self.ready = False
        self.unit: tuple[int, Unit] | None = None

    def end(self) -> str:
        """Wait for the end of the process; how it ended."""
        self.process.join()
        self.pipe.close()
        code = self.process.exitcode or 0
        if code >= 0:
            return f"its process ended with code {code}"
        killed = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"its process was ended by signal {-code}, {signal.strsignal(-code)}{killed}"


def compute_in_processes(work: Work, todo: Todo, tracker: Tracker, most: int) -> Outcomes:
    """Units in fresh processes with the threads of the spec."""
    limits = dict.fromkeys(_THREAD_VARIABLES, str(spec_of(work.context).threads))
    workers: list[_Worker] = []
    try:
        while todo or any(worker.unit for worker in workers):
            coming = sum(not worker.ready for worker in workers)
            for _ in range(min(most - len(workers), len(todo) - coming)):
                workers.append(_Worker(work.order, limits))
            for worker in workers:
                if worker.ready and worker.unit is None and todo:
                    worker.unit = todo.popleft()
                    with contextlib.suppress(BrokenPipeError):  # it is dead, as its pipe tells
                        worker.pipe.send(worker.unit)
            heard = connection.wait([worker.pipe for worker in workers], timeout=1.0)
            if not heard:
                yield None
            for worker in [worker for worker in workers if worker.pipe in heard]:
                try:
                    said = worker.pipe.recv()
                except (EOFError, OSError):
                    workers.remove(worker)
                    reason = worker.end()
                    if not worker.ready:
                        raise RunError(f"a worker died before its first unit: {reason}") from None
                    said = None if worker.unit is None else Outcome(worker.unit[0], reason=reason)
                if isinstance(said, str):
                    raise RunError(f"a worker cannot start: {said}")
                worker.ready = True
                if isinstance(said, tuple):
                    tracker.hear(*said)
                elif said is not None:
                    worker.unit = None
                    yield said
    finally:
        for worker in workers:
            worker.process.kill()
            worker.end()


def _serve(order: str, pipe: Any) -> None:
    """A local worker: says None when it is ready, then how far each unit is and its Outcome."""
    os.dup2(2, 1)  # what a job prints goes where errors go
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the writer of the run
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        work = Work.open(order)
    except Exception as cause:
        pipe.send(describe(cause))
        return
    pipe.send(None)
    while True:
        index, unit = pipe.recv()
        try:
            with advancing(lambda share, row, index=index: pipe.send((index, share, row))):  # type: ignore[misc]
                outcome = Outcome(index, work.shard(index, unit))
        except (Exception, SystemExit) as cause:
            outcome = Outcome.failed(index, cause)
        pipe.send(outcome)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)


# ---- A dask.distributed cluster: workers compute, shards come back as bytes, this process stores
# them.

_CONNECT_SECONDS = 10


def compute_on_cluster(work: Work, todo: Todo, address: str) -> Outcomes:
    """Units on a cluster by its scheduler's address, "tcp://host:port"."""
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError as cause:
        raise RunError(
            f"Dask is not installed ({cause}); install it with: pip install 'esscher[dask]'"
        ) from cause
    done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    futures: dict[str, Any] = {}
    try:
        client = distributed.Client(address, timeout=_CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as cause:
        raise RunError(
            f"no Dask scheduler answers at {address} ({cause}); expected tcp://host:port"
        ) from cause
    try:
        while todo or futures:
            while todo:
                index, unit = todo.popleft()
                # known to the whole cluster, so no other run may have it
                key = f"esscher-{secrets.token_hex(8)}"
                arguments = (work.order, index, unit, versions())
                future = client.submit(compute_remotely, *arguments, key=key, pure=False)
                futures[key] = future
                future.add_done_callback(lambda ended, index=index: done.put((index, ended)))
            try:
                index, future = done.get(timeout=1.0)
            except queue.Empty:
                yield None
                continue
            del futures[future.key]
            try:
                outcome = Outcome(index, future.result())
            except Exception as cause:
                if future.status in ("cancelled", "lost"):
                    raise RunError(
                        f"the Dask scheduler at {address} is gone: {describe(cause)}"
                    ) from cause
                outcome = Outcome.failed(index, cause)
            yield outcome
    finally:
        client.cancel(list(futures.values()), force=True)
        client.close()
