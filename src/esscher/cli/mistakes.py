"""What a user is told of what went wrong: one line on stderr and exit code 2, never a traceback."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import typer
from pydantic import ValidationError

from esscher.runs.errors import RunError, RunIncomplete, RunInterrupted, field_lines
from esscher.runs.printable import one_line

__all__ = ["answer"]

# typer may carry click inside or use the installed one: reach its base class through a public
# subclass
ClickException: type[BaseException] = typer.BadParameter.__mro__[2]

# What input, files and the machine can make a library raise; anything else is a mistake of ours and
# shows itself.
EXPECTED = (ValueError, OSError, ArithmeticError, RecursionError, MemoryError)
TRACEBACK = "ESSCHER_TRACEBACK"


def answer(mistake: BaseException) -> int | None:
    """Say it, and give the exit code; None for a mistake of ours, or where a traceback was asked
    for.

    With ESSCHER_TRACEBACK set in the environment, what a library raised comes with its traceback.
    """
    traced = bool(os.environ.get(TRACEBACK))
    if isinstance(mistake, ClickException):
        return _usage(mistake)
    if isinstance(mistake, RunIncomplete):
        return _complain(str(mistake), code=3)
    if isinstance(mistake, RunError):
        return None if traced else _complain(str(mistake))
    if isinstance(mistake, RunInterrupted):
        return _complain(str(mistake), code=130)
    if isinstance(mistake, ValidationError):
        return _complain(field_lines(mistake))
    if isinstance(mistake, BrokenPipeError):  # the reader of a pipe has had enough
        _drop_stdout()
        return 0
    if isinstance(mistake, EXPECTED):
        if traced:
            return None
        code = _complain(_said(mistake))
        _drop_stdout()  # what cannot be written now is not tried again when Python ends
        return code
    if (
        isinstance(mistake, RuntimeError)
        and not isinstance(mistake, typer.Abort)
        and _is_expected(mistake)
    ):
        return None if traced else _complain(_said(mistake))
    return 130 if isinstance(mistake, KeyboardInterrupt | typer.Abort) else None


def _said(mistake: Exception) -> str:
    """What went wrong, in words of a user's."""
    if isinstance(mistake, OSError):
        words = mistake.strerror or str(mistake) or type(mistake).__name__
        return words if mistake.filename is None else f"{os.fsdecode(mistake.filename)}: {words}"
    if isinstance(mistake, MemoryError | RuntimeError) and not isinstance(mistake, RecursionError):
        return (
            f"not enough memory, or no such computation, for what was asked ({mistake}); ask for"
            " less"
        )
    if isinstance(mistake, ArithmeticError):
        return (
            f"the numbers leave what floating point can hold ({mistake}); give sizes, scales and"
            " horizons nearer to 1"
        )
    return f"nested too deeply: {mistake}" if isinstance(mistake, RecursionError) else str(mistake)


def _is_expected(mistake: RuntimeError) -> bool:
    """torch says it with a RuntimeError when memory is short or a matrix has no decomposition."""
    return (
        type(mistake).__name__ == "_LinAlgError"
        or "allocate" in str(mistake)
        or "memory" in str(mistake)
    )


def _drop_stdout() -> None:
    """Let what is still in the buffer go nowhere, where it cannot be written."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage(mistake: Any) -> int:
    """Help when no command was given, else one line with where to look."""
    if type(mistake).__name__ == "NoArgsIsHelpError":
        print(mistake.format_message())
        return 2
    where = mistake.ctx.command_path if getattr(mistake, "ctx", None) is not None else "esscher"
    return _complain(f"{mistake.format_message()} (see {where} --help)")


def _complain(message: str, code: int = 2) -> int:
    print(one_line(f"esscher: {message}"), file=sys.stderr)
    return code
