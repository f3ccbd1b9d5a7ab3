"""``esscher resume``: complete a run that was interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from esscher.cli.output import Dask, Json, Workers, log, path_argument, print_json
from esscher.runs import resume as resume_run
from esscher.runs import terminal

__all__ = ["resume"]


def resume(
    run: Annotated[Path, path_argument("Run directory.")],
    workers: Workers = 1,
    dask: Dask = None,
    as_json: Json = False,
) -> None:
    """Complete a run: finished units are skipped, failed ones tried again, damaged shards done again and named."""
    result = resume_run(run, workers=workers, dask=dask, progress=terminal())
    if as_json:
        print_json({"path": str(result.path), "status": result.status, "tables": result.tables})
    else:
        log(f"{result.path}: {result.status}, tables {', '.join(result.tables)}")
