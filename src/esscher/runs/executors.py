"""The one interface of all who do units: what is queued, what comes back, and the end."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import queue
import secrets
import selectors
import signal
import subprocess
import sys
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from esscher.runs.columns import declare
from esscher.runs.errors import RunError, StoreError
from esscher.runs.job import Job, load_job
from esscher.runs.manifest import versions
from esscher.runs.progress import advancing
from esscher.runs.spec import RunSpec, Unit, canonical_json
from esscher.runs.tables import as_tables, encode_shard


@dataclass(frozen=True)
class Order:
    """What any process needs to do units of a run; plain text, so it travels."""

    entry: str  # "module:attribute" of the job
    header: dict[str, Any]  # of the manifest; holds the job's name and the spec

    def as_json(self) -> str:
        return canonical_json({"entry": self.entry, "header": self.header})

    @classmethod
    def from_json(cls, text: str) -> Order:
        return cls(**json.loads(text))

    def load(self) -> tuple[Job, RunSpec]:
        job = load_job(self.entry, self.header["job"])
        return job, job.spec.read(self.header["spec"])


@dataclass(frozen=True)
class Outcome:
    """What became of one try of a unit. ``data``: its shard, unless the executor's worker has
    stored it already.
    """

    index: int
    reason: str | None = None  # why it failed
    traceback: str = ""
    data: bytes | None = None


def compute_shard(job: Job, spec: RunSpec, header: dict[str, Any], index: int, unit: Unit) -> bytes:
    with threads_set(spec.threads):
        tables = job.compute(spec, unit)
    return encode_shard(
        declare(as_tables(tables), job.columns(spec)), {**header, "index": index, "unit": unit}
    )


def compute_there(order: str, index: int, unit: Unit, expected: dict[str, str]) -> bytes:
    """The same in a process of another machine, if it has the same versions: others could give
    other bits.
    """
    here = versions()
    other = [name for name in expected if here.get(name) != expected[name]]
    if other:
        found = ", ".join(f"{name} {here.get(name)} instead of {expected[name]}" for name in other)
        raise RuntimeError(f"the worker has {found}; give it the versions of the client")
    job, spec, header = _loaded(order)
    return compute_shard(job, spec, header, index, unit)


@functools.lru_cache(maxsize=8)
def _loaded(order: str) -> tuple[Job, RunSpec, dict[str, Any]]:
    parsed = Order.from_json(order)
    return *parsed.load(), parsed.header


def describe(cause: BaseException) -> tuple[str, str]:
    """An exception as one line, and its traceback."""
    text = " ".join(str(cause).split())
    reason = f"{type(cause).__name__}: {text}" if text else type(cause).__name__
    return reason[:500], "".join(traceback.format_exception(cause))[-4000:]


@contextlib.contextmanager
def threads_set(threads: int) -> Iterator[None]:
    """Let torch, where it is loaded, use so many threads: the bits of a parallel sum depend on the
    number.

    numpy's BLAS and numba read theirs when they are imported (OMP_NUM_THREADS, NUMBA_NUM_THREADS);
    local workers are started with both set.
    """
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else threads
    if torch and before != threads:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if torch and before != threads:
            torch.set_num_threads(before)


# ---- The one interface of all who do units: what is queued, what comes back, and the end.


class Executor(ABC):
    """Takes units, gives outcomes as they come. Entering starts it; leaving stops it at once,
    finished or not.

    ``submit`` and ``next`` instead of one ``map``: a unit that failed is submitted again while the
    others go on, and a second without an outcome is when progress is told. An outcome holds the
    shard, or nothing where a worker stored it already.
    """

    # told how far a unit is, where its job says so
    heard: Callable[[int, float], object] | None = None

    @abstractmethod
    def submit(self, index: int, unit: Unit) -> None:
        """Queue one try of a unit."""

    @abstractmethod
    def next(self) -> Outcome | None:
        """The next outcome; None after about a second without one."""

    @abstractmethod
    def close(self) -> None:
        """Stop at once. Work under way is lost, stored shards are not."""

    def pids(self) -> list[int]:
        """Processes of this machine that work for it, beside this one."""
        return []

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        cause: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


# ---- Units in this process, one after the other: what the other executors must agree with, bit
# for bit.


class InProcess(Executor):
    """One unit after the other in this process."""

    def __init__(self, order: Order) -> None:
        self._job, self._spec = order.load()
        self._header = order.header
        self._queue: deque[tuple[int, Unit]] = deque()

    def submit(self, index: int, unit: Unit) -> None:
        self._queue.append((index, unit))

    def next(self) -> Outcome | None:
        index, unit = self._queue.popleft()
        heard = self.heard
        try:
            with advancing(None if heard is None else lambda share: heard(index, share)):
                return Outcome(
                    index, data=compute_shard(self._job, self._spec, self._header, index, unit)
                )
        except (Exception, SystemExit) as cause:
            return Outcome(index, *describe(cause))

    def close(self) -> None:
        self._queue.clear()


# ---- Units in local processes. A process that dies costs its unit one try and is replaced.

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)
_STILLBORN = 3  # deaths before any unit, in a row, after which no worker is started any more


class _Worker:
    """One process and the unit it is at."""

    def __init__(self, environment: dict[str, str], start: str) -> None:
        # A session of its own: Ctrl-C is for the writer of the run, which then stops its workers.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "esscher.runs.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout.fileno()
        self.ready = False
        self.index: int | None = None
        self._pending = b""
        self.send(start)

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then it is dead, which its output will tell
            self.process.stdin.write(line.encode("utf-8") + b"\n")
            self.process.stdin.flush()

    def answers(self) -> list[str] | None:
        """Whole lines that have come; None at the end of output."""
        data = os.read(self.output, 1 << 16)
        if not data:
            return None
        *lines, self._pending = (self._pending + data).split(b"\n")
        return [line.decode("utf-8") for line in lines]

    def death(self) -> str:
        code = self.process.wait()
        if code >= 0:
            return f"its process ended with code {code}"
        killed = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"its process was ended by signal {-code}, {signal.strsignal(-code)}{killed}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


class Processes(Executor):
    """So many fresh processes, each with the threads of the spec, each storing the shards it
    computes.
    """

    def __init__(self, order: Order, path: Path, workers: int) -> None:
        _, spec = order.load()
        limits = dict.fromkeys(_THREAD_VARIABLES, str(spec.threads))
        # The path of this process, so that a worker finds the same modules, and (-P) no others.
        search = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._environment = {**os.environ, **limits, "PYTHONPATH": search}
        self._start = json.dumps({"order": asdict(order), "path": str(path.resolve())})
        self._limit = workers
        self._workers: list[_Worker] = []
        self._queue: deque[tuple[int, Unit]] = deque()
        self._outcomes: deque[Outcome] = deque()
        self._selector = selectors.DefaultSelector()
        self._stillborn = 0

    def submit(self, index: int, unit: Unit) -> None:
        self._queue.append((index, unit))

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def next(self) -> Outcome | None:
        self._staff()
        if not self._outcomes:
            for key, _ in self._selector.select(timeout=1.0):
                self._listen(key.data)
            self._bury()
        return self._outcomes.popleft() if self._outcomes else None

    def close(self) -> None:
        while self._workers:
            self._dismiss(self._workers[-1])
        self._selector.close()

    def _staff(self) -> None:
        """Give every idle worker a unit, and start workers while there are more units than workers
        to come.
        """
        for worker in self._workers:
            if worker.ready and worker.index is None and self._queue:
                worker.index, unit = self._queue.popleft()
                worker.send(json.dumps({"index": worker.index, "unit": unit}))
        coming = sum(not worker.ready for worker in self._workers)
        while len(self._workers) < self._limit and coming < len(self._queue):
            worker = _Worker(self._environment, self._start)
            self._workers.append(worker)
            self._selector.register(worker.output, selectors.EVENT_READ, worker)
            coming += 1

    def _listen(self, worker: _Worker) -> None:
        lines = worker.answers()
        if lines is None:
            self._lose(worker)
            return
        for line in lines:
            answer = json.loads(line)
            if "fatal" in answer:
                raise (RunError if not worker.ready else StoreError)(answer["fatal"])
            if "ready" in answer:
                worker.ready, self._stillborn = True, 0
                continue
            if "share" in answer:
                if self.heard is not None:
                    self.heard(answer["index"], answer["share"])
                continue
            worker.index = None
            self._outcomes.append(Outcome(**answer))

    def _bury(self) -> None:
        """Processes that are gone though something they started keeps their output open."""
        for worker in list(self._workers):
            if worker.process.poll() is not None and not self._has_answers(worker):
                self._lose(worker)

    def _has_answers(self, worker: _Worker) -> bool:
        return any(key.data is worker for key, _ in self._selector.select(timeout=0))

    def _lose(self, worker: _Worker) -> None:
        reason = worker.death()
        self._dismiss(worker)
        if worker.index is not None:
            self._outcomes.append(Outcome(worker.index, reason))
        elif not worker.ready:
            self._stillborn += 1
            if self._stillborn >= _STILLBORN:
                raise RunError(
                    f"{self._stillborn} workers died before their first unit; the last: {reason}"
                )

    def _dismiss(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.output)
        worker.end()


# ---- Units on a dask.distributed cluster: workers compute, shards come back as bytes, this
# process stores them.

_CONNECT_SECONDS = 10


class Cluster(Executor):
    """An existing cluster by its scheduler's address, "tcp://host:port", or "local" for one on this
    machine.
    """

    def __init__(self, order: Order, address: str, workers: int = 1) -> None:
        distributed = _distributed()
        self._order = order.as_json()
        self._address = address
        self._local: Any = None
        if address == "local":
            self._local = distributed.LocalCluster(
                n_workers=workers, threads_per_worker=1, dashboard_address=None
            )
        try:
            self._client = distributed.Client(
                self._local or address, timeout=_CONNECT_SECONDS, set_as_default=False
            )
        except (OSError, ValueError) as cause:
            raise RunError(
                f"no Dask scheduler answers at {address} ({cause}); expected tcp://host:port, or"
                " 'local'"
            ) from cause
        self._done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._futures: dict[str, Any] = {}
        # a key is known to the whole cluster, so no other run may have it
        self._token = f"esscher-{secrets.token_hex(8)}"
        self._tries = itertools.count()

    def submit(self, index: int, unit: Unit) -> None:
        key = f"{self._token}-{index}-{next(self._tries)}"
        future = self._client.submit(
            compute_there, self._order, index, unit, versions(), key=key, pure=False
        )
        self._futures[key] = future
        future.add_done_callback(lambda finished: self._done.put((index, finished)))

    def next(self) -> Outcome | None:
        try:
            index, future = self._done.get(timeout=1.0)
        except queue.Empty:
            return None
        try:
            return Outcome(index, data=future.result())
        except Exception as cause:
            if future.status in ("cancelled", "lost"):
                raise RunError(
                    f"the Dask scheduler at {self._address} is gone: {describe(cause)[0]}"
                ) from cause
            return Outcome(index, *describe(cause))
        finally:
            self._futures.pop(future.key, None)

    def close(self) -> None:
        self._client.cancel(list(self._futures.values()), force=True)
        self._client.close()
        if self._local is not None:
            self._local.close()


def _distributed() -> Any:
    try:
        import distributed
    except ImportError as cause:
        raise RunError(
            f"Dask is not installed ({cause}); install it with: pip install 'esscher[dask]'"
        ) from cause
    return distributed
