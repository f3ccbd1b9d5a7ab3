"""``esscher resume``: complete a run that was interrupted."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

from esscher.cli.domains import resume_domains
from esscher.cli.options import Execution
from esscher.cli.output import Json, log, path_argument, print_json

__all__ = ["resume"]

# The modules that register jobs: a run names its job, and only registered names are known.
JOBS = (
    "esscher.convergence.montecarlo.spec",
    "esscher.icl.concentration.spec",
    "esscher.icl.flow.spec",
    "esscher.icl.training.spec",
    "esscher.models.downstream.spec",
    "esscher.models.probe.spec",
)


def resume(
    run: Annotated[Path, path_argument("Run directory.")],
    where: Execution,
    as_json: Json = False,
) -> None:
    """Complete a run: finished units are skipped, failed ones tried again, damaged shards done again and named.

    Example: esscher resume runs/mine --workers 2
    """
    from esscher import runs

    for module in JOBS:
        importlib.import_module(module)
    group = runs.read_group(run)
    if group is not None:
        return resume_domains(group, run, where, as_json=as_json)
    result = runs.resume(run, **where, progress=runs.terminal())
    if as_json:
        print_json({"path": str(result.path), "status": result.status, "tables": result.tables})
    else:
        log(f"{result.path}: {result.status}, tables {', '.join(result.tables)}")
