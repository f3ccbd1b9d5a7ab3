"""``esscher resume``: complete a run that was interrupted, and end as the command that began it
ends.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from esscher.cli.options import Execution
from esscher.cli.output import Json, log, path_argument, print_json
from esscher.cli.probe import resume_domains

# A run names its job: the module that registers it, for only registered names are known, and how
# its command ends.
JOBS = {
    "converge": ("esscher.errors.montecarlo.spec", "esscher.cli.converge:end_converge"),
    "downstream": ("esscher.compress.spec", "esscher.cli.downstream:end_downstream"),
    "evidence": ("esscher.papers.claim", "esscher.cli.reproduce:end_evidence"),
    "icl-concentration": ("esscher.icl.specs", "esscher.cli.icl:end_concentration"),
    "icl-flow": ("esscher.icl.specs", "esscher.cli.icl:end_flow"),
    "icl-stability": ("esscher.icl.specs", "esscher.cli.icl:end_stability"),
    "icl-train": ("esscher.icl.specs", "esscher.cli.icl:end_train"),
    "normality": ("esscher.papers.specs", "esscher.cli.converge:end_normality"),
    "probe": ("esscher.probe.spec", "esscher.cli.probe:end_probe"),
}


def resume(
    run: Annotated[Path, path_argument("Run directory.")], where: Execution, as_json: Json = False
) -> None:
    """Complete a run: finished units are skipped, failed ones tried again, damaged shards done
    again and named.

    It ends as the command that began the run does: figures, report and tables.

    Example: esscher resume runs/mine --workers 2
    """
    from esscher import runs

    for module, _ in JOBS.values():
        importlib.import_module(module)
    group = runs.read_group(run)
    if group is not None:
        return resume_domains(group, run, where, as_json=as_json)
    result = runs.resume(run, **where, progress=runs.terminal())
    log(f"{result.path}: {result.status}, tables {', '.join(result.tables)}")
    _ending(result.manifest.job)(result, as_json)


def _ending(job: str) -> Callable[[Any, bool], None]:
    """How the command of a job ends; of a job of another package the tables are named."""
    if job not in JOBS:
        return _name_tables
    module, _, name = JOBS[job][1].partition(":")
    found: Callable[[Any, bool], None] = getattr(importlib.import_module(module), name)
    return found


def _name_tables(run: Any, as_json: bool) -> None:
    if as_json:
        print_json({"path": str(run.path), "status": run.status, "tables": run.tables})
