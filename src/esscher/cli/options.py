"""Flags of commands: from the fields of their specs, and those that many commands share.

A command lists its flags in its signature, as typer has them, and takes what is said of a flag from
the field: ``window: Annotated[int | None, option(ProbeSpec, "window")] = None``. A flag that is not
given is None (or False), and the field's own default holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel

from esscher.hf.checkpoint import PACKAGED

if TYPE_CHECKING:
    from esscher.runs import Run, RunSpec

EVERYDAY = "Everyday options"
TEXT, MEASURED, SIZE = "Text", "What to measure", "How much"
OUTPUT, PLACE = "Output", "Where it runs"
MOST_WORKERS = 1024
WINDOW = "512, or 2048 for a sequence, or what the model takes"  # tokens, unless told
MODEL = (
    f"A folder, a GGUF file, a hub name, or {' or '.join(known.name for known in PACKAGED)}, which"
    f" come as packages (default: {PACKAGED[0].name})."
)


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


def switch(name: str, help: str, panel: str | None = None, **more: Any) -> Any:
    """A typer option that no spec has."""
    return typer.Option(name, help=help, rich_help_panel=panel, **more)


def as_path(text: str | Path) -> Path:
    """A path as a user names it; an empty name would be the working folder."""
    if not str(text).strip():
        raise typer.BadParameter(
            f"expected the name of a file or folder, got {text!r}; the working folder is ."
        )
    return Path(text)


def path_argument(help: str, shown: str = "RUN") -> Any:
    return typer.Argument(help=help, parser=as_path, metavar=shown)


def path_option(name: str, help: str, panel: str | None = OUTPUT) -> Any:
    return switch(name, help, panel, parser=as_path, metavar="PATH")


def given(flags: Mapping[str, Any], *specs: type[BaseModel]) -> dict[str, Any]:
    """The flags that were given, from ``locals()`` of a command; with specs, their fields alone."""
    known = {name for spec in specs for name in spec.model_fields}
    return {
        name: value
        for name, value in flags.items()
        if value is not None and value is not False and (not specs or name in known)
    }


def run_spec(spec: RunSpec, flags: Mapping[str, Any], name: str = "", opened: Any = None) -> Run:
    """Run a spec where the flags --out, --workers and --dask say; in runs/NAME-HASH if nowhere."""
    from esscher.runs import execute, terminal

    path = flags.get("out") or Path("runs") / f"{name or spec.job}-{spec.hash[:8]}"
    where: dict[str, Any] = {"workers": flags.get("workers") or 1, "dask": flags.get("dask")}
    return execute(spec, path, **where, progress=terminal(), opened=opened)


def check_device(name: str) -> str:
    """A device on which tensors can be made here."""
    import torch

    try:
        if torch.empty(1, device=name).device.type == "meta":
            raise ValueError(
                f"--device: expected a device that computes, such as cpu or cuda, got {name!r}"
            )
    except (RuntimeError, AssertionError) as cause:  # torch's words for a device that is not there
        raise ValueError(f"--device: {name!r} cannot be used here: {cause}") from cause
    return name


# ---- Flags that many commands share.

Workers = Annotated[
    int, switch("--workers", "Number of local processes.", PLACE, min=1, max=MOST_WORKERS)
]
Dask = Annotated[
    str | None, switch("--dask", "Run on a Dask cluster, e.g. tcp://host:8786.", PLACE)
]
All = Annotated[bool, switch("--all", "Print the full tables.", OUTPUT)]
Json = Annotated[bool, switch("--json", "Print everything as JSON.", OUTPUT)]
Report = Annotated[bool, switch("--report/--no-report", "Write report.html into the run.", OUTPUT)]
OUT = "Run directory (default: runs/NAME-HASH)."
Out = Annotated[Path | None, path_option("--out", OUT)]
