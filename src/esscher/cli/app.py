"""The application: the table of commands, each imported when it is called, and what happens around
one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import os
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from typer.core import TyperCommand, TyperGroup

from esscher import __version__
from esscher.cli.options import with_fields
from esscher.runs.errors import RunError, RunIncomplete, RunInterrupted, field_lines, one_line

COMMANDS = (
    "predict",
    "converge",
    "fit",
    "describe",
    "probe",
    "budget",
    "downstream",
    "reproduce",
    "ls",
    "resume",
    "report",
    "export",
    "cite",
    "icl",
)
"""In the order of help. A command is the function of its name in the module of its name, or a Typer
of several.
"""

OUTSIDE = "esscher.commands"
"""The group of entry points by which other packages add commands: name = "module:function", or a
Typer.
"""

SETTINGS: dict[str, Any] = {
    "rich_markup_mode": None,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class Commands(MutableMapping[str, Any]):
    """Commands by name, as click has them, each imported when it is looked up. Our own names come
    first and stay ours.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = _as_click(name, _found(name))
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*COMMANDS, *_outside()]))

    def __len__(self) -> int:
        return len(list(iter(self)))


class Root(TyperGroup):
    """The group of all commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: Any) -> Any:
        """Typer would make a bare exit code of Ctrl-C: what it says is said here."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            return _answered(stop)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list in help: names and first sentences; flags of a command are not looked at, nor
        the spec they come from.
        """
        names = self.list_commands(ctx)
        limit = formatter.width - 6 - max(map(len, names))
        with formatter.section("Commands"):
            formatter.write_dl([(name, _titled(name).get_short_help_str(limit)) for name in names])


def _found(name: str) -> Any:
    """The function or the Typer behind a name."""
    if name in COMMANDS:
        return getattr(importlib.import_module(f"esscher.cli.{name}"), name)
    return _outside()[name].load()


def _titled(name: str) -> TyperCommand:
    """A command that has its help alone."""
    found = _found(name)
    return TyperCommand(
        name, help=found.info.help if isinstance(found, typer.Typer) else inspect.getdoc(found)
    )


def _as_click(name: str, found: Any) -> Any:
    """A function, or a Typer of several, as a click command of this name."""
    if isinstance(found, typer.Typer):
        for part in found.registered_commands:
            if part.callback is not None:
                part.callback = with_fields(part.callback)  # once more changes nothing
        group = typer.main.get_group(found)
        group.name = name
        return group
    single = typer.Typer(add_completion=False, **SETTINGS)
    single.command(name)(with_fields(found))
    return typer.main.get_command(single)


@functools.cache
def _outside() -> dict[str, EntryPoint]:
    return {
        entry.name: entry
        for entry in sorted(entry_points(group=OUTSIDE), key=lambda entry: entry.name)
    }


@functools.cache
def _command() -> Any:
    """All commands as click has them; made once, for those who call main again and again."""
    app = typer.Typer(
        name="esscher", cls=Root, no_args_is_help=True, pretty_exceptions_enable=False, **SETTINGS
    )
    app.callback()(_root)
    return typer.main.get_command(app)


def _tell_version(asked: bool) -> None:
    if asked:
        print(f"esscher {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_tell_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    """How many tokens does attention need? Limits, exact errors and rates of attention heads.

    Example: esscher predict --gaussian --dim 50 --horizon 1.5
    """


def _answered(mistake: BaseException) -> int:
    """The exit code of what went wrong, once it is said; a mistake of ours is raised again."""

    code = answer(mistake)
    if code is None:
        raise mistake
    return code


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Bad input ends with one line on stderr and exit code 2, never with a
    traceback.

    Idle threads sleep, unless OMP_WAIT_POLICY says otherwise: where other processes want the cores
    too, threads that spin while they wait made a probe more than five times slower than one thread.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when the first command imports torch
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _command()(args=arguments, prog_name="esscher", standalone_mode=False)
        sys.stdout.flush()
    except typer.Exit as stop:
        code = stop.exit_code
    except (Exception, KeyboardInterrupt) as mistake:
        code = _answered(mistake)
    sys.exit(code if isinstance(code, int) else 0)


# ---- What a user is told of what went wrong: one line on stderr and exit code 2, never a
# traceback.

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
