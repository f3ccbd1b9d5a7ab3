"""``esscher ls``: the runs in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from esscher.cli.output import Json, log, path_argument, print_json, print_table


def ls(
    folder: Annotated[Path, path_argument("Folder that holds run directories.", "FOLDER")] = Path(),
    as_json: Json = False,
) -> None:
    """List runs: job, status, units done, when they started.

    Example: esscher ls runs
    """
    from esscher.runs import list_runs

    runs = list_runs(folder)
    records = [
        {
            "path": str(run.path),
            "job": run.manifest.job,
            "title": str(run.spec.get("title", "")),
            "status": run.status,
            "done": run.progress.done,
            "units": run.manifest.units,
            "failed": len(run.failures),
            "started": run.manifest.started,
        }
        for run in runs
    ]
    if as_json:
        print_json(records)
    elif not records:
        log(f"no runs in {folder}")
    else:
        rows = [
            [
                r["path"],
                r["job"],
                r["title"],
                r["status"],
                f"{r['done']}/{r['units']}",
                str(r["started"])[:19],
            ]
            for r in records
        ]
        columns = ["run", "job", "title", "status", "units", "started"]
        print_table("runs", columns, [[str(cell) for cell in row] for row in rows], left=4)
