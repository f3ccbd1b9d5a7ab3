"""What commands print: tables for people, JSON for machines; logs go to stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
import yaml
from rich.console import Console
from rich.table import Table

__all__ = ["Dask", "Device", "Dtype", "Json", "Seed", "Workers", "as_dtype", "log", "print_json", "print_table", "read_yaml"]

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything random.")]
Device = Annotated[str, typer.Option("--device", help="Where tensors live: cpu, cuda, cuda:1 ...")]
Dtype = Annotated[str, typer.Option("--dtype", help="float32 or float64.")]

Workers = Annotated[int, typer.Option("--workers", help="Local processes; 1 is this one.")]
Dask = Annotated[
    str | None, typer.Option("--dask", help="Scheduler of a Dask cluster, tcp://host:8786; or local for one of --workers.")
]

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def as_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"--dtype: expected {' or '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    print(json.dumps(_plain(value), indent=2, allow_nan=False, ensure_ascii=False))


def _plain(value: Any) -> Any:
    """Numbers, lists and dictionaries; JSON has no infinity and no NaN, so these become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
    """A compact table; the first ``left`` columns hold words, the others numbers."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # off a terminal rich would fold to 80 columns; a pipe can take any width
    console = Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)
    console.print(table)


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds one mapping."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as cause:
        raise ValueError(f"{path}: no such file; give a YAML file or flags") from cause
    except (yaml.YAMLError, UnicodeDecodeError) as cause:
        raise ValueError(f"{path}: not readable as YAML: {cause}") from cause
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a mapping of fields, got {type(content).__name__}")
    return content
