"""How far a run is: a snapshot for callbacks, a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil

from esscher.runs.errors import one_line

_log = logging.getLogger("esscher.runs")


def cores() -> int:
    """Number of cores this process may use."""
    if hasattr(psutil.Process, "cpu_affinity"):  # macOS binds no process to cores
        return len(psutil.Process().cpu_affinity())
    return psutil.cpu_count() or 1


@dataclass(frozen=True)
class Progress:
    """Units done and to do, rate and time left since this start."""

    done: int
    total: int
    failed: int = 0
    rate: float | None = None  # units per second
    seconds_left: float | None = None
    message: str | None = None  # what happened, in words
    ended: bool = False
    under_way: float = 0.0  # sum of the shares done of units under way
    finding: Mapping[str, Any] | None = None  # a row of what was found, its name first

    def line(self) -> str:
        """All of it on one line."""
        done = f"{self.done + self.under_way:.1f}" if self.under_way else f"{self.done}"
        parts = [f"{done}/{self.total} units"]
        if self.failed:
            parts.append(f"{self.failed} failed")
        if self.rate is not None:
            parts.append(f"{self.rate:.3g}/s")
        if self.seconds_left is not None and not self.ended:
            parts.append(f"{timedelta(seconds=round(self.seconds_left))} left")
        return ", ".join(parts)


Report = Callable[[Progress], object]
MOST_FINDINGS = 12  # rows of the table beside the bar


Heard = Callable[[float, Mapping[str, Any] | None], object]
_heard: ContextVar[Heard] = ContextVar("heard", default=lambda share, finding: None)


def advance(share: float, finding: Mapping[str, Any] | None = None) -> None:
    """Called by a job to say how far its unit is, from 0 to 1, and what it found: a row of a table,
    whose first entry names it.
    """
    _heard.get()(share, finding)


@contextlib.contextmanager
def advancing(heard: Heard) -> Iterator[None]:
    """Inside, ``advance`` calls this."""
    token = _heard.set(heard)
    try:
        yield
    finally:
        _heard.reset(token)


class Tracker:
    """Counts the units of one start and tells the report, or the log."""

    def __init__(self, report: Report | None, costs: Mapping[int, float], total: int) -> None:
        """``costs``: of the units to do, by number; the time left is that of their work."""
        self.total, self.failed = total, 0
        self.done = self._before = total - len(costs)
        self._report, self._costs = report, costs
        self._parts: dict[int, float] = {}  # of units under way: how far each is
        self._work, self._left = 0.0, sum(costs.values())  # of units done, and of the others
        self._start = time.monotonic()

    def tick(
        self,
        *,
        message: str | None = None,
        ended: bool = False,
        finding: Mapping[str, Any] | None = None,
    ) -> None:
        """Tell the report how far the run is."""
        if self._report is None:
            return
        under_way = sum(self._parts.values())
        part = sum(share * self._costs[index] for index, share in self._parts.items())
        units, work = self.done - self._before + under_way, self._work + part
        elapsed = max(time.monotonic() - self._start, 1e-9)
        self._report(
            Progress(
                self.done,
                self.total,
                self.failed,
                rate=units / elapsed if units else None,
                seconds_left=(self._left - part) * elapsed / work if work else None,
                message=message,
                ended=ended,
                under_way=under_way,
                finding=finding,
            )
        )

    def hear(self, index: int, share: float, finding: Mapping[str, Any] | None = None) -> None:
        """A unit is that far, and found this."""
        self._parts[index] = share
        self.tick(finding=finding)

    def again(self, index: int) -> None:
        """A unit has to be done from its start."""
        self._parts.pop(index, None)

    def end(self, index: int, *, failed: bool = False) -> None:
        """A unit is done, or given up."""
        self.again(index)
        self.failed += failed
        self.done += not failed
        self._left -= self._costs[index]
        self._work += 0.0 if failed else self._costs[index]

    def say(self, message: str) -> None:
        if self._report is None:
            _log.warning("%s", one_line(message))
        self.tick(message=message)


def terminal(stream: Any = None, every: float = 5.0) -> Report:
    """A report for a stream (stderr unless told): a bar on a terminal, else a line now and then."""
    stream = sys.stderr if stream is None else stream
    return _Bar(stream) if stream.isatty() else _Lines(stream, every)


def watched(progress: Any = None) -> Report | None:
    """The report that ``progress`` stands for: a function is itself, True is the terminal's, False
    none; None is the terminal's in a terminal and in a notebook.
    """
    if callable(progress):
        report: Report = progress
        return report
    if progress is None:
        progress = sys.stderr.isatty() or "ipykernel" in sys.modules
    return terminal() if progress else None


class _Lines:
    """A line at the start, at the end and every few seconds; messages at once."""

    def __init__(self, stream: Any, every: float) -> None:
        self._stream, self._every, self._last = stream, every, float("-inf")

    def __call__(self, progress: Progress) -> None:
        if progress.message is not None:
            print(one_line(progress.message), file=self._stream, flush=True)
        elif progress.ended or time.monotonic() - self._last >= self._every:
            self._last = time.monotonic()
            print(progress.line(), file=self._stream, flush=True)


class _Bar:
    """rich's bar below a table of the last findings, a row for each; messages appear above it."""

    def __init__(self, stream: Any) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Rich
        from rich.table import Table

        found = self._found = dict[str, dict[str, str]]()  # by the first entry of a row

        class Watched(Rich):
            def get_renderables(self) -> Iterator[Any]:
                rows = list(found.values())[-MOST_FINDINGS:]
                if rows:
                    table = Table(box=None, pad_edge=False, header_style="")
                    for name in rows[-1]:
                        table.add_column(name, justify="right")
                    for row in rows:
                        table.add_row(*(row.get(name, "") for name in rows[-1]))
                    yield table
                yield self.make_tasks_table(self.tasks)

        text = TextColumn("{task.description}")
        self._bar: Any = Watched(BarColumn(), text, console=Console(file=stream))
        self._task: Any = None

    def __call__(self, progress: Progress) -> None:
        if self._task is None:
            self._task = self._bar.add_task("", total=progress.total)
            self._bar.start()
        if progress.message is not None:
            line = one_line(progress.message)
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        if progress.finding is not None:
            row = {
                key: f"{value:.3g}" if isinstance(value, float) else str(value)
                for key, value in progress.finding.items()
            }
            self._found.pop(first := next(iter(row.values())), None)
            self._found[first] = row
        done = progress.done + progress.under_way
        self._bar.update(self._task, completed=done, description=progress.line())
        if progress.ended:
            self._found.clear()
            self._bar.stop()
            self._task = None
