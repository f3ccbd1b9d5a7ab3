"""The one interface of all who do units: what is queued, what comes back, and the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType

from esscher.runs.executors.order import Outcome
from esscher.runs.spec import Unit

__all__ = ["Executor"]


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
