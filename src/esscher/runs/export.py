"""A run's tables as files other tools read."""

from __future__ import annotations

import importlib
import json
import math
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv

from esscher.runs.errors import RunError
from esscher.runs.files import ENDINGS
from esscher.runs.run import Run, load_run
from esscher.runs.spec import canonical_json
from esscher.runs.store import write_durable
from esscher.runs.tables import encode_table


def export_run(
    path: str | os.PathLike[str],
    to: str = "csv",
    out: str | os.PathLike[str] = ".",
    *,
    overwrite: bool = False,
) -> list[Path]:
    """Write every final table of a run into the folder ``out``, a file each, and return the files.

    "json" is a list of rows, with null where a number is none. "netcdf" is one xarray dataset per
    table along the dimension "row", with the spec among its attributes. Files that are there
    already are refused unless ``overwrite``.
    """
    if to not in ENDINGS:
        raise ValueError(f"to: expected one of {', '.join(ENDINGS)}, got {to!r}")
    run, folder = load_run(path), Path(out)
    if not run.tables:
        raise RunError(f"{run.path}: no tables to export yet ({run.status})")
    if folder.resolve() == run.path.resolve():
        raise ValueError(f"out: expected another folder than the run itself, got {folder}")
    files = {name: folder / f"{name}{ENDINGS[to]}" for name in run.tables}
    there = [file for file in files.values() if os.path.lexists(file)]
    if there and not overwrite:
        raise ValueError(
            f"out: {there[0]} is there already; choose another folder, or ask to overwrite it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in files.items():
        if to == "csv":
            sink = pa.BufferOutputStream()
            pyarrow.csv.write_csv(run.arrow(name), sink)
            write_durable(file, sink.getvalue().to_pybytes())
        elif to == "parquet":
            write_durable(
                file, encode_table(run.arrow(name), {**run.manifest.header, "table": name})
            )
        elif to == "json":
            write_durable(file, _as_json(run.arrow(name)))
        else:
            _write_netcdf(run, name, file)
    return list(files.values())


def _as_json(table: pa.Table) -> bytes:
    """Rows as JSON has them: it knows no NaN and no infinity."""
    rows = [
        {key: None if _is_no_number(value) else value for key, value in row.items()}
        for row in table.to_pylist()
    ]
    return json.dumps(rows, indent=1, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"


def _is_no_number(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _write_netcdf(run: Run, name: str, file: Path) -> None:
    try:
        xarray: Any = importlib.import_module("xarray")
    except ImportError as cause:
        raise RunError(
            "xarray is not installed; install it with: pip install 'esscher[netcdf]'"
        ) from cause
    frame: Any = run.table(name).rename_axis("row")
    dataset = xarray.Dataset.from_dataframe(frame)
    dataset.attrs = {
        "job": run.manifest.job,
        "spec": canonical_json(run.spec),
        "spec_hash": run.manifest.spec_hash,
    }
    dataset.to_netcdf(file)
