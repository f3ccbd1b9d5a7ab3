"""Units in local processes. A process that dies costs its unit one try and is replaced."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from dataclasses import asdict
from pathlib import Path

from esscher.runs.errors import RunError, StoreError
from esscher.runs.executors.base import Executor
from esscher.runs.executors.order import Order, Outcome
from esscher.runs.spec import Unit

__all__ = ["Processes"]

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
            [sys.executable, "-P", "-m", "esscher.runs.executors.worker"],
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
