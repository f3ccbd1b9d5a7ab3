"""The application: commands, and one line with exit code 2 for whatever a user got wrong."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
from pydantic import ValidationError

from esscher.cli.budget import budget
from esscher.cli.cite import cite
from esscher.cli.converge import converge
from esscher.cli.describe import describe
from esscher.cli.export import export
from esscher.cli.fit import fit
from esscher.cli.icl import icl
from esscher.cli.ls import ls
from esscher.cli.predict import predict
from esscher.cli.probe import probe
from esscher.cli.report import report
from esscher.cli.resume import resume
from esscher.runs import RunError, RunIncomplete, RunInterrupted
from esscher.runs.printable import one_line

__all__ = ["app", "main"]

# typer may carry click inside or use the installed one: reach its base class through a public subclass
ClickException: type[BaseException] = typer.BadParameter.__mro__[2]

# What input, files and the machine can make a library raise; anything else is a mistake of ours and shows itself.
EXPECTED = (ValueError, OSError, ArithmeticError, RecursionError, MemoryError)
TRACEBACK = "ESSCHER_TRACEBACK"

app = typer.Typer(
    name="esscher",
    help="How many tokens does attention need? Limits, exact errors and rates of attention heads.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(predict)
app.command()(converge)
app.command()(fit)
app.command()(describe)
app.command()(probe)
app.command()(budget)
app.add_typer(icl, name="icl")
app.command()(ls)
app.command()(resume)
app.command()(report)
app.command()(export)
app.command()(cite)


@app.callback()
def _root() -> None:
    """How many tokens does attention need? Limits, exact errors and rates of attention heads."""


@functools.cache
def _command() -> Any:
    """The commands as click has them; made once, for those who call main again and again."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Bad input ends with one line on stderr and exit code 2, never with a traceback.

    With ESSCHER_TRACEBACK set in the environment, what a library raised comes with its traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _command()(args=arguments, prog_name="esscher", standalone_mode=False)
        sys.stdout.flush()
    except typer.Exit as stop:
        code = stop.exit_code
    except ClickException as mistake:
        code = _usage(mistake)
    except RunIncomplete as unfinished:
        code = _complain(str(unfinished), code=3)
    except RunError as mistake:
        if os.environ.get(TRACEBACK):
            raise
        code = _complain(str(mistake))
    except RunInterrupted as stop:
        code = _complain(str(stop), code=130)
    except ValidationError as mistake:
        code = _complain("; ".join(_field_line(error) for error in mistake.errors()))
    except BrokenPipeError:  # the reader of a pipe has had enough
        _drop_stdout()
        code = 0
    except EXPECTED as mistake:
        if os.environ.get(TRACEBACK):
            raise
        code = _complain(_said(mistake))
        _drop_stdout()  # what cannot be written now is not tried again when Python ends
    except RuntimeError as mistake:
        if os.environ.get(TRACEBACK) or not _is_expected(mistake):
            raise
        code = _complain(_said(mistake))
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


def _said(mistake: Exception) -> str:
    """What went wrong, in words of a user's."""
    if isinstance(mistake, OSError):
        words = mistake.strerror or str(mistake) or type(mistake).__name__
        return words if mistake.filename is None else f"{os.fsdecode(mistake.filename)}: {words}"
    if isinstance(mistake, MemoryError | RuntimeError) and not isinstance(mistake, RecursionError):
        return f"not enough memory, or no such computation, for what was asked ({mistake}); ask for less"
    if isinstance(mistake, ArithmeticError):
        return f"the numbers leave what floating point can hold ({mistake}); give sizes, scales and horizons nearer to 1"
    return f"nested too deeply: {mistake}" if isinstance(mistake, RecursionError) else str(mistake)


def _is_expected(mistake: RuntimeError) -> bool:
    """torch says it with a RuntimeError when memory is short or a matrix has no decomposition."""
    return type(mistake).__name__ == "_LinAlgError" or "allocate" in str(mistake) or "memory" in str(mistake)


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


def _field_line(error: object) -> str:
    """One pydantic complaint as "field: what is wrong, got what"."""
    assert isinstance(error, dict)
    where = ".".join(str(part) for part in error["loc"]) or "input"
    text = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        text = "no such field"
    given = error.get("input")
    shown = "" if isinstance(given, dict | list | tuple) or error["type"] == "extra_forbidden" else f", got {given!r}"
    return f"{where}: {text[:1].lower() + text[1:]}{shown}"
