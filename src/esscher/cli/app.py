"""The application: the table of commands, each imported when it is called, and the one place where
mistakes become a line and an exit code.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup, TyperOption

from esscher import __version__
from esscher.runs.errors import RunError, RunIncomplete, field_lines, one_line

PANELS = {
    "A model on text": ["describe", "probe", "budget", "compress", "rules"],
    "Laws of tokens": ["predict", "converge"],
    "In-context learning and the papers": ["icl", "reproduce", "cite"],
    "Stored runs": ["ls", "resume", "report", "fit", "export"],
}
_OTHERS = {
    "describe": "probe",
    **dict.fromkeys(("ls", "resume", "report", "fit", "export", "cite"), "runs"),
}
COMMANDS = {name: _OTHERS.get(name, name) for names in PANELS.values() for name in names}
"""Command -> module of esscher.cli that has a function, or a Typer of several, of this name."""

OUTSIDE = "esscher.commands"
"""Entry points by which other packages add commands: name = "module:function", or a Typer."""

HELP: Any = {"help_option_names": ["-h", "--help"]}
SETTINGS: Any = {"rich_markup_mode": "markdown", "context_settings": HELP}
TYPES = {bool: "", int: "INTEGER", float: "NUMBER", Path: "PATH", list[Path]: "PATH"}  # else TEXT


class Root(TyperGroup):
    """All commands by name, each imported when it is looked up. Names of ours stay ours."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        outside = sorted(entry.name for entry in entry_points(group=OUTSIDE))
        self.commands: Any = dict.fromkeys([*COMMANDS, *outside])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load_command(cmd_name) if cmd_name in self.commands else None

    def invoke(self, ctx: Any) -> Any:
        """Typer would turn Ctrl-C into a bare exit code, without the command to go on."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            return answer(stop)


@functools.cache
def load_command(name: str) -> Any:
    """A command as click has it."""
    if name in COMMANDS:
        found = getattr(importlib.import_module(f"esscher.cli.{COMMANDS[name]}"), name)
    else:
        (entry,) = entry_points(group=OUTSIDE, name=name)
        found = entry.load()
    panel = next((panel for panel, names in PANELS.items() if name in names), "Other commands")
    if isinstance(found, typer.Typer):
        command: Any = typer.main.get_group(found)
        command.name = name
    else:
        single = typer.Typer(add_completion=False, **SETTINGS)
        single.command(name)(found)
        command = typer.main.get_command(single)
    command.rich_help_panel = panel
    for part in (command, *getattr(command, "commands", {}).values()):
        _plain_types(part)
    return command


def _plain_types(command: Any) -> None:
    """Types in help as TEXT, INTEGER, PATH, in place of <str>, <int>, <Path>, without bounds; every
    default at the end of its sentence.
    """
    for flag in (*command.params, command.get_help_option(SimpleNamespace(**HELP))):
        plain = TYPES.get(flag.type_descriptor.annotation, "TEXT")
        if isinstance(flag, TyperOption):
            flag.metavar = plain if flag.metavar is None else flag.metavar
            flag._get_number_range_help_str = str  # type: ignore[method-assign]
        else:
            flag.display_type_rich = lambda ctx, plain=plain: plain
        shown = flag.opts[0] if flag.default is True else flag.default
        if flag.show_default and shown not in (None, "") and shown is not False:
            flag.help = f"{flag.help.rstrip('.')} (default: {shown})."
            flag.show_default = False


def _print_version(asked: bool) -> None:
    if asked:
        print(f"esscher {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="esscher", cls=Root, no_args_is_help=True, pretty_exceptions_enable=False, **SETTINGS
)


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """How many tokens does attention need, and which? Measure the heads of a model, compress its KV
    cache, or compute the exact error of attention on a law of tokens.

    Example: esscher probe smollm2 --text book.txt
    """


app.callback()(_root)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Bad input ends with one line on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    root = typer.main.get_command(app)
    _plain_types(root)
    try:
        code = root(args=arguments, prog_name="esscher", standalone_mode=False)
        sys.stdout.flush()
    except typer.Exit as stop:
        code = stop.exit_code
    except (Exception, KeyboardInterrupt) as mistake:
        code = answer(mistake)
    sys.exit(code if isinstance(code, int) else 0)


# typer carries click inside or uses the installed one: its base class through a public subclass
ClickException: Any = typer.BadParameter.__mro__[2]


def answer(mistake: BaseException) -> int:
    """Print what went wrong in one line and return the exit code; a bug of ours is raised again."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # full or closed: Python would try it again when it ends
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(mistake, BrokenPipeError):  # the reader of a pipe has had enough
        return 0
    if type(mistake).__name__ == "NoArgsIsHelpError":
        print(mistake)
        return 2
    message = _message(mistake)
    if message is None:
        raise mistake
    if message:
        print(one_line(f"esscher: {message}"), file=sys.stderr)
    if isinstance(mistake, KeyboardInterrupt | typer.Abort):
        return 130
    return 3 if isinstance(mistake, RunIncomplete) else 2


def _message(mistake: Any) -> str | None:
    """What input, files or the machine made a library raise, in words; None for a bug of ours."""
    match mistake:
        case ValidationError():
            return field_lines(mistake)
        case OSError():
            words = mistake.strerror or str(mistake) or type(mistake).__name__
            name = mistake.filename
            return words if name is None else f"{os.fsdecode(name)}: {words}"
        case RecursionError() | ArithmeticError():
            return f"nested too deeply, or numbers too far from 1 ({mistake}); give others"
        case ValueError() | RunError() | KeyboardInterrupt() | typer.Abort():
            return str(mistake)
        case MemoryError() | RuntimeError():
            # torch raises RuntimeError where memory is short or a matrix has no decomposition
            told = f"{type(mistake).__name__}: {mistake}"
            if any(word in told for word in ("MemoryError", "_LinAlgError", "allocate", "memory")):
                return f"not enough memory, or no such computation ({mistake}); ask for less"
    if isinstance(mistake, ClickException):
        context = getattr(mistake, "ctx", None)
        where = "esscher" if context is None else context.command_path
        return f"{mistake.format_message()} (see {where} --help)"
    return None
