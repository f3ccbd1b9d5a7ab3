"""``esscher export``: a run's tables as files other tools read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from esscher.cli.output import Json, log, path_argument, path_option, print_json

__all__ = ["export"]

KINDS = {"csv": "csv", "parquet": "parquet", "xarray-netcdf": "netcdf", "netcdf": "netcdf"}


def export(
    run: Annotated[Path, path_argument("Run directory.")],
    to: Annotated[str, typer.Option("--to", help="Format: csv, parquet or xarray-netcdf.")] = "csv",
    out: Annotated[Path, path_option("--out", "Folder to write to.")] = Path("export"),
    as_json: Json = False,
) -> None:
    """Write every table of a finished run into a folder, one file each.

    Example: esscher export runs/mine --to csv --out tables
    """
    from esscher.runs import export_run

    if to not in KINDS:
        raise ValueError(f"--to: expected csv, parquet or xarray-netcdf, got {to!r}")
    files = export_run(run, to=KINDS[to], out=out)
    if as_json:
        print_json([str(file) for file in files])
    else:
        for file in files:
            log(str(file))
