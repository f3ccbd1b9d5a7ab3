"""What can go wrong with a run, each with a line that says what to do."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esscher.runs.run import Run

__all__ = ["Damaged", "RunError", "RunIncomplete", "RunInterrupted", "RunLocked", "StoreError", "resume_command"]


def resume_command(path: Path) -> str:
    """The shell command that continues a run."""
    return f"esscher resume {shlex.quote(str(path))}"


class RunError(Exception):
    """A run cannot be started, read or continued."""


class Damaged(RunError):
    """A stored file is not what was written: its checksum, its format or its place is wrong."""


class RunLocked(RunError):
    """Another process writes this run."""


class StoreError(RunError):
    """The disk refused a write: no space, no quota, read-only. What was finished before is kept."""


class RunIncomplete(RunError):
    """Some units failed every time they were tried; the others are stored in ``run``. ``resume`` is the command."""

    def __init__(self, run: Run) -> None:
        self.run: Any = run
        self.resume = resume_command(run.path)
        failed = run.failures
        first = f" (the first: unit {failed[0].index}, {failed[0].reason})" if failed else ""
        super().__init__(
            f"{run.path}: {len(failed)} of {run.progress.total} units failed{first}; "
            f"the others are kept. To try again: {self.resume}"
        )


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C during a run: what was finished is kept. ``resume`` is the command that continues."""

    def __init__(self, path: Path, done: int, total: int) -> None:
        self.path = path
        self.resume = resume_command(path)
        super().__init__(f"{path}: stopped after {done} of {total} units, which are kept. To continue: {self.resume}")
