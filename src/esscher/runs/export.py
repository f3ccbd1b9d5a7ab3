"""A run's tables as files other tools read."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv

from esscher.runs.errors import RunError
from esscher.runs.run import Run, load_run
from esscher.runs.spec import canonical_json
from esscher.runs.store import write_durable
from esscher.runs.tables import encode_table

__all__ = ["export_run"]

_ENDINGS = {"csv": ".csv", "parquet": ".parquet", "netcdf": ".nc"}


def export_run(path: str | os.PathLike[str], to: str = "csv", out: str | os.PathLike[str] = ".") -> list[Path]:
    """Write every final table of a run into the folder ``out``, a file each, and return the files.

    "netcdf" is one xarray dataset per table along the dimension "row", with the spec among its attributes.
    """
    if to not in _ENDINGS:
        raise ValueError(f"to: expected one of {', '.join(_ENDINGS)}, got {to!r}")
    run, folder = load_run(path), Path(out)
    if not run.tables:
        raise RunError(f"{run.path}: no tables to export yet ({run.status})")
    if folder.resolve() == run.path.resolve():
        raise ValueError(f"out: expected another folder than the run itself, got {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in run.tables:
        file = folder / f"{name}{_ENDINGS[to]}"
        if to == "csv":
            sink = pa.BufferOutputStream()
            pyarrow.csv.write_csv(run.arrow(name), sink)
            write_durable(file, sink.getvalue().to_pybytes())
        elif to == "parquet":
            write_durable(file, encode_table(run.arrow(name), {**run.manifest.header, "table": name}))
        else:
            _write_netcdf(run, name, file)
        written.append(file)
    return written


def _write_netcdf(run: Run, name: str, file: Path) -> None:
    try:
        xarray: Any = importlib.import_module("xarray")
    except ImportError as cause:
        raise RunError("xarray is not installed; install it with: pip install 'esscher[netcdf]'") from cause
    frame: Any = run.table(name).rename_axis("row")
    dataset = xarray.Dataset.from_dataframe(frame)
    dataset.attrs = {"job": run.manifest.job, "spec": canonical_json(run.spec), "spec_hash": run.manifest.spec_hash}
    dataset.to_netcdf(file)
