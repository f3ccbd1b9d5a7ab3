"""Where units are computed: in this process, in local processes, or on a Dask cluster.

A local worker is ``python -m esscher.runs.executors``: it reads units from standard input, stores
their shards and answers on standard output, a JSON object per line. It ends when its input does, so
it never outlives the process that started it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esscher.runs.columns import declare
from esscher.runs.errors import RunError, StoreError
from esscher.runs.manifest import versions
from esscher.runs.progress import advancing
from esscher.runs.spec import Job, RunSpec, Unit, find_job
from esscher.runs.store import Store
from esscher.runs.tables import as_tables, encode_shard


@dataclass(frozen=True)
class Outcome:
    """Result of one try of a unit. ``data``: its shard, unless a worker has stored it already."""

    index: int
    reason: str | None = None  # why it failed
    traceback: str = ""
    data: bytes | None = None

    @classmethod
    def failed(cls, index: int, cause: BaseException) -> Outcome:
        trace = "".join(traceback.format_exception(cause))[-4000:]
        return cls(index, describe(cause), trace)


def describe(cause: BaseException) -> str:
    """An exception as one line."""
    text = " ".join(str(cause).split())
    return (f"{type(cause).__name__}: {text}" if text else type(cause).__name__)[:500]


@functools.lru_cache(maxsize=8)
def _load(order: str) -> tuple[Job, RunSpec, dict[str, Any]]:
    """Job, spec and header of a run from the JSON that any process can be given."""
    given = json.loads(order)
    job = find_job(given["header"]["job"], given["entry"])
    return job, job.spec.read(given["header"]["spec"]), given["header"]


def compute_shard(order: str, index: int, unit: Unit) -> bytes:
    """The shard of one unit, computed in this process with the threads of the spec.

    ``order``: JSON of ``entry``, "module:attribute" of the job, and ``header``, that of the
    manifest.
    """
    job, spec, header = _load(order)
    with _threads(spec.threads):
        tables = job.compute(spec, unit)
    return encode_shard(
        declare(as_tables(tables), job.columns(spec)), {**header, "index": index, "unit": unit}
    )


def compute_remotely(order: str, index: int, unit: Unit, expected: dict[str, str]) -> bytes:
    """The same on another machine, refused with other versions, which could give other bits."""
    here = versions()
    other = [name for name in expected if here.get(name) != expected[name]]
    if other:
        found = ", ".join(f"{name} {here.get(name)} instead of {expected[name]}" for name in other)
        raise RuntimeError(f"the worker has {found}; give it the versions of the client")
    return compute_shard(order, index, unit)


@contextlib.contextmanager
def _threads(threads: int) -> Iterator[None]:
    """Set torch's threads, where it is loaded: the bits of a parallel sum depend on the number.

    numpy's BLAS and numba read theirs from the environment when they are imported; local workers
    are started with it.
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


class Executor:
    """Takes units, gives outcomes as they come; a failed unit can be submitted again meanwhile.

    ``submit`` queues one try of a unit. ``next`` is the next outcome, or None after about a second
    without one. ``close`` stops at once: work under way is lost, stored shards are not.
    """

    # called with a unit's index and how far it is, where its job says so
    heard: Callable[[int, float], object] = staticmethod(lambda index, share: None)

    def submit(self, index: int, unit: Unit) -> None:
        raise NotImplementedError

    def next(self) -> Outcome | None:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to stop."""

    def pids(self) -> list[int]:
        """Processes of this machine that work for it, beside this one."""
        return []


class InProcess(Executor):
    """One unit after the other in this process; the other executors give the same bytes."""

    def __init__(self, order: str) -> None:
        self._order = order
        self._queue: deque[tuple[int, Unit]] = deque()

    def submit(self, index: int, unit: Unit) -> None:
        self._queue.append((index, unit))

    def next(self) -> Outcome | None:
        index, unit = self._queue.popleft()
        try:
            with advancing(lambda share: self.heard(index, share)):
                return Outcome(index, data=compute_shard(self._order, index, unit))
        except (Exception, SystemExit) as cause:
            return Outcome.failed(index, cause)


# ---- Local processes. A process that dies costs its unit one try and is replaced.

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)
_STILLBORN = 3  # deaths before any unit, in a row, after which the run ends


class Processes(Executor):
    """Fresh processes with the threads of the spec, each served by a thread of this one, each
    storing the shards it computes.
    """

    def __init__(self, order: str, path: Path, workers: int) -> None:
        _, spec, _ = _load(order)
        limits = dict.fromkeys(_THREAD_VARIABLES, str(spec.threads))
        # The path of this process, so that a worker finds the same modules, and (-P) no others.
        search = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._environment = {**os.environ, **limits, "PYTHONPATH": search}
        self._start = {"order": order, "path": str(path.resolve())}
        self._units: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[str]] = []
        self._stillborn, self._closed, self._lock = 0, False, threading.Lock()
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, index: int, unit: Unit) -> None:
        self._units.put({"index": index, "unit": unit})

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def next(self) -> Outcome | None:
        try:
            answer = self._answers.get(timeout=1.0)
        except queue.Empty:
            return None
        if "fatal" in answer:
            raise (StoreError if answer.get("disk") else RunError)(answer["fatal"])
        if "share" in answer:
            self.heard(answer["index"], answer["share"])
            return None
        return Outcome(**answer)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.kill()
        for _ in self._threads:
            self._units.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        """Give one process units, and replace it when it dies."""
        try:
            while (process := self._begin()) is not None:
                unit = None
                if ready := self._talk(process, self._start):
                    self._stillborn = 0
                    while (unit := self._units.get()) is not None and self._talk(process, unit):
                        pass
                self._bury(process, ready, unit)
        except Exception as cause:  # no process can be started
            self._answers.put({"fatal": describe(cause)})

    def _begin(self) -> subprocess.Popen[str] | None:
        with self._lock:
            if self._closed or self._stillborn >= _STILLBORN:
                return None
            # A session of its own: Ctrl-C is for the writer of the run, which stops its workers.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "esscher.runs.executors"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._environment,
                start_new_session=True,
                encoding="utf-8",
            )
            self._processes.append(process)
            return process

    def _talk(self, process: subprocess.Popen[str], message: Mapping[str, Any]) -> bool:
        """Send a message and pass the answers on until it is done; False where the process died or
        gave up.
        """
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(message), file=process.stdin, flush=True)
            for line in process.stdout or ():
                answer = json.loads(line)
                if "ready" in answer:
                    return True
                self._answers.put(answer)
                if "share" not in answer:
                    return "fatal" not in answer
        return False

    def _bury(
        self, process: subprocess.Popen[str], ready: bool, unit: dict[str, Any] | None
    ) -> None:
        """Say why a process died; after several deaths before the first unit the run ends."""
        with contextlib.suppress(BrokenPipeError), process:
            pass  # its pipes are closed and its end is waited for
        code = process.returncode
        reason = f"its process ended with code {code}"
        if code < 0:
            killed = " (out of memory?)" if -code == signal.SIGKILL else ""
            reason = f"its process was ended by signal {-code}, {signal.strsignal(-code)}{killed}"
        with self._lock:
            self._processes.remove(process)
            if unit is not None:
                self._answers.put({"index": unit["index"], "reason": reason})
            elif not ready:
                self._stillborn += 1
                if self._stillborn == _STILLBORN:
                    died = f"{_STILLBORN} workers died before their first unit; the last: {reason}"
                    self._answers.put({"fatal": died})


def main() -> None:
    """A local worker."""
    # What a job prints must not mix with the answers: it goes where errors go.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    threading.Thread(target=read, daemon=True).start()
    try:
        start = json.loads(lines.get())
        store = Store(Path(start["path"]))
        _load(start["order"])
    except Exception as cause:
        answer(fatal=f"a worker cannot start: {describe(cause)}")
        return
    answer(ready=True)
    while _do(start["order"], store, answer, **json.loads(lines.get())):
        pass


def _do(order: str, store: Store, answer: Callable[..., None], index: int, unit: Unit) -> bool:
    """Compute and store one unit; False where the disk refused it."""
    try:
        with advancing(lambda share: answer(index=index, share=share)):
            data = compute_shard(order, index, unit)
        store.write_shard(index, data)
        answer(index=index)
    except StoreError as cause:
        answer(fatal=str(cause), disk=True)
        return False
    except (Exception, SystemExit) as cause:
        failed = Outcome.failed(index, cause)
        answer(index=index, reason=failed.reason, traceback=failed.traceback)
    return True


# ---- A dask.distributed cluster: workers compute, shards come back as bytes, this process stores
# them.

_CONNECT_SECONDS = 10


class Cluster(Executor):
    """An existing cluster by its scheduler's address, "tcp://host:port", or "local" for one on this
    machine.
    """

    def __init__(self, order: str, address: str, workers: int = 1) -> None:
        try:
            distributed: Any = importlib.import_module("distributed")
        except ImportError as cause:
            raise RunError(
                f"Dask is not installed ({cause}); install it with: pip install 'esscher[dask]'"
            ) from cause
        self._order, self._address = order, address
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
        token = secrets.token_hex(8)
        self._keys = (f"esscher-{token}-{number}" for number in itertools.count())

    def submit(self, index: int, unit: Unit) -> None:
        future = self._client.submit(
            compute_remotely, self._order, index, unit, versions(), key=next(self._keys), pure=False
        )
        self._futures[future.key] = future
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
                    f"the Dask scheduler at {self._address} is gone: {describe(cause)}"
                ) from cause
            return Outcome.failed(index, cause)
        finally:
            self._futures.pop(future.key, None)

    def close(self) -> None:
        self._client.cancel(list(self._futures.values()), force=True)
        self._client.close()
        if self._local is not None:
            self._local.close()


if __name__ == "__main__":
    main()
