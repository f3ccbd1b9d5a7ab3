"""Units in this process, one after the other: what the other executors must agree with, bit for
bit.
"""

from __future__ import annotations

from collections import deque

from esscher.runs.executors.base import Executor
from esscher.runs.executors.order import Order, Outcome, compute_shard, describe
from esscher.runs.progress import advancing
from esscher.runs.spec import Unit

__all__ = ["InProcess"]


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
