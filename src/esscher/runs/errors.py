"""Exceptions of runs, each with a line that says what to do; text made fit for a terminal."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

    from esscher.runs.run import Run

NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")  # of a table


class RunError(Exception):
    """A run cannot be started, read or continued."""


class Damaged(RunError):
    """A stored file is not what was written: its checksum, its format or its place is wrong."""


class RunLocked(RunError):
    """Another process writes this run."""


class StoreError(RunError):
    """The disk refused a write: no space, no quota, read-only. What was finished before is kept."""


class RunIncomplete(RunError):
    """Some units failed every time they were tried; the others are stored in ``run``. ``resume`` is
    the command.
    """

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
        super().__init__(
            f"{path}: stopped after {done} of {total} units, which are kept. To continue:"
            f" {self.resume}"
        )


def resume_command(path: Path) -> str:
    """The shell command that continues a run."""
    return f"esscher resume {shlex.quote(str(path))}"


def field_lines(cause: ValidationError, most: int | None = None) -> str:
    """pydantic's complaints on one line, each as "field: what is wrong, got what"."""
    errors: list[dict[str, Any]] = [dict(error) for error in cause.errors(include_url=False)]
    places = [error["loc"] for error in errors]
    # a list is too short when its entries are wrong: the entries are told
    told = [
        error
        for error in errors
        if error["type"] != "too_short"
        or not any(error["loc"] == place[:-1] for place in places if place)
    ]
    return "; ".join(map(_field_line, told[:most]))


def _field_line(error: dict[str, Any]) -> str:
    *path, field = error["loc"] or ("input",)
    if error["type"] == "extra_forbidden":
        return f"{'.'.join(map(str, error['loc']))}: no such field"
    text, given = str(error["msg"]).removeprefix("Value error, "), error.get("input")
    if not text.startswith(f"{field}: "):  # our own words may name the field already
        text = f"{field}: {text[:1].lower()}{text[1:]}"
    shown = "" if "got " in text or isinstance(given, dict | list | tuple) else f", got {given!r}"
    return ".".join([*map(str, path), text]) + shown


def printable(text: str) -> str:
    """The text with control characters, escapes, text direction marks and half surrogates written
    out: \\x1b, \\u202e.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def one_line(text: str, most: int = 500) -> str:
    """The text on one printable line; of a longer one the beginning and the end."""
    line = printable(" ".join(text.split()))
    if len(line) <= most:
        return line
    end = most // 3
    return f"{line[: most - end - 5]} ... {line[-end:]}"


def plain(value: Any) -> Any:
    """Numbers, lists and dictionaries as JSON has them: infinity and NaN become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # a number or an array of numpy's
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
