"""``esscher export``: a run's tables as files other tools read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from esscher.cli.output import Json, log, path_argument, path_option, print_json
from esscher.runs.files import ENDINGS


def export(
    run: Annotated[Path, path_argument("Run directory.")],
    to: Annotated[str, typer.Option("--to", help=f"Format: {', '.join(ENDINGS)}.")] = "csv",
    out: Annotated[Path, path_option("--out", "Folder to write to.")] = Path("export"),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write over files of these names.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write every table of a finished run into a folder, one file each.

    Example: esscher export runs/mine --to csv --out tables
    """
    from esscher.runs import export_run

    if to not in ENDINGS:
        raise ValueError(f"--to: expected one of {', '.join(ENDINGS)}, got {to!r}")
    files = export_run(run, to=to, out=out, overwrite=overwrite)
    if as_json:
        print_json([str(file) for file in files])
    else:
        for file in files:
            log(str(file))
