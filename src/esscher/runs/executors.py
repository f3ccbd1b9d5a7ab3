"""Where units are computed: in this process, in local processes, or on a Dask cluster.

An executor is a generator: it takes units from the queue ``todo``, to which a failed unit may come
back, and yields an Outcome for each try, or None after about a second without one. Closing it stops
all work; stored shards are kept.

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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esscher.runs.columns import declare
from esscher.runs.errors import RunError, StoreError
from esscher.runs.progress import Tracker, advancing
from esscher.runs.run import versions
from esscher.runs.spec import JOBS, Job, Unit, canonical_json, find_job, spec_of
from esscher.runs.store import Store
from esscher.runs.tables import as_tables, encode_shard

Todo = deque[tuple[int, Unit]]


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


@dataclass(frozen=True)
class Work:
    """A run in a process that computes its units: ``context`` is what its job opened, ``header``
    that of the manifest.
    """

    job: Job
    context: Any
    header: dict[str, Any]

    @classmethod
    def open(cls, order: str) -> Work:
        """From the JSON that any process can be given: ``entry``, "module:attribute" of the job,
        and ``header``.
        """
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


def compute_here(work: Work, todo: Todo, tracker: Tracker) -> Iterator[Outcome | None]:
    """One unit after the other in this process; the other executors give the same bytes."""
    while todo:
        index, unit = todo.popleft()
        try:
            with advancing(functools.partial(tracker.hear, index)):
                outcome = Outcome(index, data=work.shard(index, unit))
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
    """A process, the thread that passes its answers on, and the unit it is at."""

    def __init__(self, answers: queue.SimpleQueue[Any], start: Any, limits: dict[str, str]) -> None:
        # The path of this process, so that a worker finds the same modules, and (-P) no others.
        search = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        # A session of its own: Ctrl-C is for the writer of the run, which stops its workers.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "esscher.runs.executors"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **limits, "PYTHONPATH": search},
            start_new_session=True,
            encoding="utf-8",
        )
        self.ready = False
        self.unit: tuple[int, Unit] | None = None
        self._thread = threading.Thread(target=self._listen, args=[answers], daemon=True)
        self._thread.start()
        self.send(start)

    def send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # then it is dead, which its output tells
            print(json.dumps(message), file=self.process.stdin, flush=True)

    def _listen(self, answers: queue.SimpleQueue[Any]) -> None:
        for line in self.process.stdout or ():
            answers.put((self, json.loads(line)))
        answers.put((self, {"died": True}))

    def end(self) -> str:
        """Wait for the end of the process; how it ended."""
        self._thread.join()
        with contextlib.suppress(BrokenPipeError), self.process:
            pass  # its pipes are closed and its end is waited for
        code = self.process.returncode
        if code >= 0:
            return f"its process ended with code {code}"
        killed = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"its process was ended by signal {-code}, {signal.strsignal(-code)}{killed}"


def compute_in_processes(
    work: Work, todo: Todo, tracker: Tracker, path: Path, most: int
) -> Iterator[Outcome | None]:
    """Units in fresh processes with the threads of the spec; each stores its shards itself."""
    limits = dict.fromkeys(_THREAD_VARIABLES, str(spec_of(work.context).threads))
    start = {"order": work.order, "path": str(path.resolve())}
    answers: queue.SimpleQueue[tuple[_Worker, dict[str, Any]]] = queue.SimpleQueue()
    workers: list[_Worker] = []
    try:
        while todo or any(worker.unit for worker in workers):
            coming = sum(not worker.ready for worker in workers)
            for _ in range(min(most - len(workers), len(todo) - coming)):
                workers.append(_Worker(answers, start, limits))
            for worker in workers:
                if worker.ready and worker.unit is None and todo:
                    worker.unit = index, unit = todo.popleft()
                    worker.send({"index": index, "unit": unit})
            tracker.pids = [worker.process.pid for worker in workers]
            try:
                worker, answer = answers.get(timeout=1.0)
            except queue.Empty:
                yield None
                continue
            if "fatal" in answer:
                raise (StoreError if worker.ready else RunError)(answer["fatal"])
            if "ready" in answer:
                worker.ready = True
            elif "share" in answer:
                tracker.hear(**answer)
            elif "died" in answer:
                workers.remove(worker)
                reason = worker.end()
                if not worker.ready:
                    raise RunError(f"a worker died before its first unit: {reason}")
                if worker.unit is not None:
                    yield Outcome(worker.unit[0], reason)
            else:
                worker.unit = None
                yield Outcome(**answer)
    finally:
        tracker.pids = []
        for worker in workers:
            worker.process.kill()
            worker.end()


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

    def compute(index: int, unit: Unit) -> None:
        try:
            with advancing(lambda share, row: answer(index=index, share=share, finding=row)):
                data = work.shard(index, unit)
            store.write_shard(index, data)
            answer(index=index)
        except StoreError as cause:
            answer(fatal=str(cause))
        except (Exception, SystemExit) as cause:
            failed = Outcome.failed(index, cause)
            answer(index=index, reason=failed.reason, traceback=failed.traceback)

    threading.Thread(target=read, daemon=True).start()
    try:
        start = json.loads(lines.get())
        store = Store(Path(start["path"]))
        work = Work.open(start["order"])
    except Exception as cause:
        answer(fatal=f"a worker cannot start: {describe(cause)}")
        return
    answer(ready=True)
    while True:
        compute(**json.loads(lines.get()))


# ---- A dask.distributed cluster: workers compute, shards come back as bytes, this process stores
# them.

_CONNECT_SECONDS = 10


def compute_on_cluster(work: Work, todo: Todo, address: str) -> Iterator[Outcome | None]:
    """Units on a cluster by its scheduler's address, "tcp://host:port"."""
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError as cause:
        raise RunError(
            f"Dask is not installed ({cause}); install it with: pip install 'esscher[dask]'"
        ) from cause
    done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    futures: dict[str, Any] = {}
    # a key is known to the whole cluster, so no other run may have it
    token, numbers = secrets.token_hex(8), itertools.count()
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
                key = f"esscher-{token}-{next(numbers)}"
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
                outcome = Outcome(index, data=future.result())
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


if __name__ == "__main__":
    main()
