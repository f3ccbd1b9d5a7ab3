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

EVERYDAY = "Everyday options"
TEXT, MEASURED, SIZE = "Text", "What to measure", "How much"
OUTPUT, PLACE = "Output", "Where it runs"
MOST_WORKERS = 1024
WINDOW = "512, or 2048 for a sequence, or what the model takes"  # tokens, unless told


def option(
    spec: type[BaseModel], name: str, panel: str | None = None, flag: str = "", default: str = ""
) -> Any:
    """A typer option for a field of a spec: help and default are the field's, and the spec checks
    values. ``default``: what is shown where the field has no one value for a default.
    """
    field = spec.model_fields[name]
    about = (field.description or name).rstrip(".")
    if not default and isinstance(field.default, int | float | str) and field.default is not False:
        default = str(field.default)
    return typer.Option(
        flag or f"--{name.replace('_', '-')}",
        help=f"{about[:1].upper()}{about[1:]}{f' (default: {default})' * bool(default)}.",
        show_default=False,
        rich_help_panel=panel,
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
    typer.Option(help="Number of local processes.", min=1, max=MOST_WORKERS, rich_help_panel=PLACE),
]
Dask = Annotated[
    str | None,
    typer.Option(
        help="Run on a Dask cluster, e.g. tcp://host:8786.",
        rich_help_panel=PLACE,
    ),
]
All = Annotated[bool, typer.Option("--all", help="Print the full tables.", rich_help_panel=OUTPUT)]
