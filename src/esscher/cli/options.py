"""Flags of commands from the fields of their specs.

A command lists its flags in its signature, as typer has them, and takes what is said of a flag from
the field: ``window: Annotated[int | None, option(ProbeSpec, "window")] = None``. A flag that is not
given is None (or False), and the field's own default holds.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import typer
from pydantic import BaseModel, Field

from esscher.runs.spec import Plain

TEXT, MEASURED, SIZE = "Text", "What to measure", "How much"
OUTPUT, PLACE = "Output", "Where it runs"
MOST_WORKERS = 1024


def option(
    spec: type[BaseModel], name: str, panel: str | None = None, flag: str = "", default: str = ""
) -> Any:
    """A typer option for a field of a spec: help, bounds and shown default are the field's.

    ``default``: what is shown where the field has no one value for a default.
    """
    field = spec.model_fields[name]
    about = (field.description or name).rstrip(".")
    plain = isinstance(field.default, int | float | str) and not isinstance(field.default, bool)
    bounds: dict[str, Any] = {}
    least = next((part.ge for part in field.metadata if hasattr(part, "ge")), None)
    below = next((part.lt for part in field.metadata if hasattr(part, "lt")), None)
    if least is not None and below is not None:  # a seed; the spec itself refuses the rest
        bounds = {"min": least, "max": below - 1}
    return typer.Option(
        flag or f"--{name.replace('_', '-')}",
        help=f"{about[:1].upper()}{about[1:]}.",
        show_default=default or (str(field.default) if plain and field.default != "" else False),
        rich_help_panel=panel,
        **bounds,
    )


def given(flags: Mapping[str, Any], *specs: type[BaseModel]) -> dict[str, Any]:
    """The flags that were given, from ``locals()`` of a command; with specs, their fields alone."""
    known = {name for spec in specs for name in spec.model_fields}
    return {
        name: value
        for name, value in flags.items()
        if value is not None and value is not False and (not specs or name in known)
    }


Workers = Annotated[
    int,
    typer.Option(
        help="Local processes; 1 is this process.",
        min=1,
        max=MOST_WORKERS,
        rich_help_panel=PLACE,
    ),
]
Dask = Annotated[
    str | None,
    typer.Option(
        help="Scheduler of a Dask cluster, tcp://host:8786; or local for one of --workers.",
        rich_help_panel=PLACE,
    ),
]
Top = Annotated[
    int | None,
    typer.Option(help="Rows of the table, at most.", min=1, max=10**9 - 1, rich_help_panel=OUTPUT),
]
Sort = Annotated[
    str | None,
    typer.Option(
        help="Column to order the rows by; NAME:down for the largest first.", rich_help_panel=OUTPUT
    ),
]
Markdown = Annotated[
    bool, typer.Option("--markdown", help="Print tables as Markdown.", rich_help_panel=OUTPUT)
]
All = Annotated[bool, typer.Option("--all", help="Print the full tables.", rich_help_panel=OUTPUT)]


# ---- The same as parameters that stand for several flags.

Given = dict[str, Any]
"""Values by field."""


@dataclass(frozen=True)
class Fields:
    """Fields of a spec that are flags, in the order of help.

    A flag has the field's name, or the one in ``flags``; with ``defaults`` its default too, else a
    field whose flag was not given is left to the spec, and help says what that takes: the field's
    default, or the words in ``left_out``. A tuple of numbers is text, which the spec or the command
    reads; one of words or fractions is a flag that may be repeated, unless ``as_text`` has it.
    """

    spec: str
    names: tuple[str, ...]
    flags: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    as_text: Mapping[str, str] = field(default_factory=dict)  # and what separates its parts
    defaults: bool = False

    def parameters(self) -> list[inspect.Parameter]:
        """What typer makes flags of."""
        module, _, name = self.spec.partition(":")
        known = getattr(importlib.import_module(module), name).model_fields
        return [self._parameter(field, known[field]) for field in self.names]

    def _parameter(self, name: str, about: Any) -> inspect.Parameter:
        kind = str if name in self.as_text else _kind(about.annotation)
        default: Any = False if kind is bool else None
        if self.defaults and about.default is not None:
            default = (
                self._text(name, about.default)
                if isinstance(about.default, tuple)
                else about.default
            )
        flag = f"--{self.flags.get(name, name).replace('_', '-')}"
        help = about.description[:1].upper() + about.description[1:]
        if default is None and (note := self.left_out.get(name, _shown(about.default))):
            help += f"; {note}"
        least, most = _bounds(about.metadata)
        option = typer.Option(flag, help=f"{help}.", min=least, max=most)
        annotation = Annotated[kind if default is not None else kind | None, option]  # type: ignore[valid-type]
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )

    def _text(self, name: str, values: Sequence[Any]) -> str:
        return self.as_text.get(name, ",").join(map(_number, values))


EXECUTION = "esscher.cli.options:Executed"
Execution = Annotated[Given, Fields(EXECUTION, ("workers", "dask"), defaults=True)]
"""Where a run is computed, as :func:`esscher.runs.execute` takes it."""


def with_fields(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command as typer takes it: each parameter that stands for fields replaced by a flag for
    each of them.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    groups = {name: found for name, hint in hints.items() if (found := _fields_of(hint))}
    if not groups:
        return command
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            parameters += [flag for group in groups[parameter.name] for flag in group.parameters()]
        else:
            own = {"kind": inspect.Parameter.KEYWORD_ONLY, "annotation": hints[parameter.name]}
            parameters.append(parameter.replace(**own))

    @functools.wraps(command)
    def called(**values: Any) -> Any:
        for name, found in groups.items():
            given = {known: values.pop(known) for group in found for known in group.names}
            values[name] = {
                known: value
                for known, value in given.items()
                if value is not None and value is not False
            }
        return command(**values)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del called.__wrapped__  # typer would look behind it
    return called


def _fields_of(hint: Any) -> list[Fields]:
    return [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Fields)]


def _kind(annotation: Any) -> Any:
    """The kind of a flag for values of a field."""
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return _kind(next(part for part in inside if part is not type(None)))
    if origin is Annotated:
        return _kind(inside[0])
    if origin is Literal:
        return str
    if origin is tuple:
        part = _kind(inside[0])
        return str if part is int else list[part]  # type: ignore[valid-type]
    assert annotation in (bool, int, float, str), annotation
    return annotation


def _bounds(metadata: Sequence[Any]) -> tuple[int | None, int | None]:
    """Of a seed; what else a field refuses, the spec refuses in its own words."""
    below = next((bound.lt for bound in metadata if hasattr(bound, "lt")), None)
    least = next((bound.ge for bound in metadata if hasattr(bound, "ge")), None)
    return (None, None) if below is None or least is None else (least, below - 1)


def _shown(default: Any) -> str:
    """What a field takes when it is left out, where that is one value."""
    return (
        str(default)
        if isinstance(default, int | float | str)
        and not isinstance(default, bool)
        and default != ""
        else ""
    )


def _number(value: Any) -> str:
    """As people write it: 3e4 for 30000."""
    text = str(value)
    first, zeros = text.rstrip("0"), len(text) - len(text.rstrip("0"))
    return f"{first}e{zeros}" if isinstance(value, int) and zeros > 3 else text


# ---- Where a run is computed, as flags say it.


class Executed(Plain):
    """Arguments of :func:`esscher.runs.execute`."""

    workers: int = Field(
        default=1, ge=1, lt=MOST_WORKERS + 1, description="local processes; 1 is this one"
    )
    dask: str | None = Field(
        default=None,
        description="scheduler of a Dask cluster, tcp://host:8786; or local for one of --workers",
    )
