"""The application: the table of commands, each imported when it is called, and what happens around
one.
"""

from __future__ import annotations

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
from typer.core import TyperCommand, TyperGroup

from esscher import __version__
from esscher.cli.options import with_fields

__all__ = ["COMMANDS", "OUTSIDE", "main"]

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
    from esscher.cli.mistakes import answer  # its imports are needed now only

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
