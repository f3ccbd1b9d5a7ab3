"""Write the tables anew: ``python -m tests.snapshot [RUN ...]``, where a change of numbers is
meant.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.snapshot.runs import RUNS
from tests.snapshot.tables import kept, tables_of

for name in sys.argv[1:] or RUNS:
    with tempfile.TemporaryDirectory() as folder:
        RUNS[name](Path(folder) / name)
        home = kept(name)
        home.mkdir(parents=True, exist_ok=True)
        for old in home.glob("*.parquet"):
            old.unlink()
        for table, frame in tables_of(Path(folder) / name).items():
            frame.to_parquet(home / f"{table}.parquet", index=False)
            print(f"{name}/{table}: {frame.shape[0]} rows, {frame.shape[1]} columns")
