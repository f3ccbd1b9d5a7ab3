"""Flags of commands from the fields of their specs.

A command lists its flags in its signature, as typer has them, and takes what is said of a flag from
the field: ``window: Annotated[int | None, option(ProbeSpec, "window")] = None``. A flag that is not
given is None (or False), and the field's own default holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from pydantic import BaseModel

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
