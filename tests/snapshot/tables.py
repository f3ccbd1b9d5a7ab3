"""Tables of a run as they are kept, and how two of them are compared."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd

import esscher as es

LEFT_OUT = {"about"}  # names the machine's own paths and hashes of temporary files
CLOSE = 1e-10  # relative to the number, or to the largest of its column
# runs that sum tokens in float32, in an order that the width of the processor's vectors sets
SINGLE = {"icl_train": 1e-6}
# A stated relative error is itself only known to rounding of the numbers it speaks of, and a
# relative difference from the model's own output is nothing but rounding, which differs between
# processors.
OWN_SIZE = {"accuracy": 1.0, "output_difference": 1.0}


def kept(run: str) -> Path:
    return Path(__file__).parent / run


def tables_of(folder: Path) -> dict[str, pd.DataFrame]:
    """The tables of a run, or the verdicts of claims as one table."""
    if (verdicts := folder / "reproduce.json").is_file():
        claims = json.loads(verdicts.read_text())["claims"]
        rows = [
            {key: claim[key] for key in ("id", "verdict", "value", "low", "high")}
            for claim in claims
        ]
        return {"verdicts": pd.DataFrame(rows)}
    run = es.load_run(folder)
    return {name: run.table(name) for name in run.tables if name not in LEFT_OUT}


def differences(
    name: str, found: pd.DataFrame, expected: pd.DataFrame, close: float = CLOSE
) -> list[str]:
    """What differs in names, order, types or values, a line each."""
    if list(found.columns) != list(expected.columns):
        return [f"{name}: columns {list(found.columns)}, expected {list(expected.columns)}"]
    if len(found) != len(expected):
        return [f"{name}: {len(found)} rows, expected {len(expected)}"]
    lines = []
    for column in expected.columns:
        new, old = found[column], expected[column]
        if str(new.dtype) != str(old.dtype):
            lines.append(f"{name}.{column}: type {new.dtype}, expected {old.dtype}")
        elif old.dtype.kind == "f":
            size = OWN_SIZE.get(
                column, np.abs(old[np.isfinite(old)]).max() if np.isfinite(old).any() else 0.0
            )
            off = ~np.isclose(new, old, rtol=close, atol=close * size, equal_nan=True)
            if off.any():
                row = int(np.flatnonzero(off)[0])
                lines.append(
                    f"{name}.{column}: {off.sum()} differ, first in row {row}: {new[row]!r},"
                    f" expected {old[row]!r}"
                )
        elif not _same_objects(new, old, close):
            lines.append(f"{name}.{column}: values differ")
    return lines


def _same_objects(new: pd.Series, old: pd.Series, close: float) -> bool:
    """Whole numbers and words as they are; lists of numbers (a column of objects) as closely as
    numbers.
    """
    for a, b in zip(new, old, strict=True):
        if isinstance(b, np.ndarray):
            a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)  # empty: of no type
            if a.shape != b.shape or not np.allclose(
                a, b, rtol=close, atol=close * float(np.abs(b).max(initial=0.0))
            ):
                return False
        elif a != b and not (a is None and b is None):
            return False
    return True
