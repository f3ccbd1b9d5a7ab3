"""Where units are computed, behind one small interface; here: in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from types import TracebackType

from esscher.runs.executors.work import Order, Outcome, compute_shard, describe
from esscher.runs.spec import Unit

__all__ = ["Executor", "InProcess"]


class Executor(ABC):
    """Takes units, gives outcomes as they come. Entering starts it; leaving stops it at once, finished or not."""

    name: str

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

    def __exit__(self, kind: type[BaseException] | None, cause: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class InProcess(Executor):
    """One unit after the other in this process."""

    name = "this process"

    def __init__(self, order: Order) -> None:
        self._job, self._spec = order.load()
        self._header = order.header
        self._queue: deque[tuple[int, Unit]] = deque()

    def submit(self, index: int, unit: Unit) -> None:
        self._queue.append((index, unit))

    def next(self) -> Outcome | None:
        index, unit = self._queue.popleft()
        try:
            return Outcome(index, data=compute_shard(self._job, self._spec, self._header, index, unit))
        except (Exception, SystemExit) as cause:
            return Outcome(index, *describe(cause))

    def close(self) -> None:
        self._queue.clear()
