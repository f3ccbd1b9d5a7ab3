"""Commands about stored runs: ``ls``, ``resume``, ``report``, ``export``; and ``cite``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from esscher.cli.options import Dask, Workers
from esscher.cli.output import (
    Json,
    as_formats,
    log,
    log_files,
    path_argument,
    path_option,
    print_json,
    show,
)
from esscher.report.style import FORMATS
from esscher.runs.run import EXPORTS

JOBS = {
    "converge": ("esscher.errors.montecarlo.spec", "esscher.cli.converge:end_converge"),
    "compress": ("esscher.compress.spec", "esscher.cli.compress:end_compress"),
    "evidence": ("esscher.papers.claim", "esscher.cli.reproduce:end_evidence"),
    "icl-concentration": ("esscher.icl.specs", "esscher.cli.icl:end_concentration"),
    "icl-flow": ("esscher.icl.specs", "esscher.cli.icl:end_flow"),
    "icl-stability": ("esscher.icl.specs", "esscher.cli.icl:end_stability"),
    "icl-train": ("esscher.icl.specs", "esscher.cli.icl:end_train"),
    "probe": ("esscher.probe.spec", "esscher.cli.probe:end_probe"),
}
"""Job of a run -> the module that registers it, and the function that ends its command."""


def ls(
    folder: Annotated[Path, path_argument("Folder that holds run directories.", "FOLDER")] = Path(),
    as_json: Json = False,
) -> None:
    """List runs with their status and how much of them is done.

    Example: esscher ls runs
    """
    from esscher.runs import list_runs

    records = [
        {
            "path": str(run.path),
            "job": run.manifest.job,
            "title": str(run.spec.get("title", "")),
            "status": run.status,
            "done": run.progress.done,
            "units": run.manifest.units,
            "failed": len(run.failures),
            "started": run.manifest.started[:19],
        }
        for run in list_runs(folder)
    ]
    if as_json:
        print_json(records)
    elif not records:
        log(f"no runs in {folder}")
    else:
        show("runs", records)


def resume(
    run: Annotated[Path, path_argument("Run directory.")],
    workers: Workers = 1,
    dask: Dask = None,
    as_json: Json = False,
) -> None:
    """Complete a run that was interrupted.

    Finished units are skipped, failed and damaged ones computed again. It ends as the command that
    began the run does: figures, report and tables.

    Example: esscher resume runs/mine --workers 2
    """
    from esscher import runs

    for module, _ in JOBS.values():
        importlib.import_module(module)
    result = runs.resume(run, workers=workers, dask=dask, progress=runs.terminal())
    log(f"{result.path}: {result.status}, tables {', '.join(result.tables)}")
    if result.manifest.job in JOBS:
        module, _, name = JOBS[result.manifest.job][1].partition(":")
        getattr(importlib.import_module(module), name)(result, as_json)
    elif as_json:  # a job of another package
        print_json({"path": str(result.path), "status": result.status, "tables": result.tables})


def report(
    runs: Annotated[list[Path], path_argument("Run directories; several are set side by side.")],
    out: Annotated[
        Path | None, path_option("--out", "The page; report.html in the first run when left out.")
    ] = None,
    figures: Annotated[
        str,
        typer.Option(
            help=f"Figure files too, in figures of each run: {', '.join(FORMATS)}, with commas."
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Write runs as one HTML page that works offline; several are set side by side.

    Example: esscher report runs/mine --figures svg,pdf
    """
    from esscher.papers.judge import read_verdicts
    from esscher.report import write_report
    from esscher.report.figures import save_figures
    from esscher.report.page import write_verdicts
    from esscher.runs import load_run

    formats = as_formats(figures)
    written: list[Path] = []
    if len(runs) == 1 and (verdicts := read_verdicts(runs[0])) is not None:
        page = write_verdicts(runs[0], verdicts, out)
    else:
        loaded = [load_run(path) for path in runs]
        page = write_report(loaded, out)
        for run in loaded if formats else []:
            written += save_figures(run, formats, run.path / "figures")
    if as_json:
        return print_json({"page": str(page), "figures": [str(file) for file in written]})
    log_files("page", [page])
    log_files("figure", written)


def export(
    run: Annotated[Path, path_argument("Run directory.")],
    to: Annotated[str, typer.Option(help=f"Format: {', '.join(EXPORTS)}.")] = "csv",
    out: Annotated[Path, path_option("--out", "Folder to write to.")] = Path("export"),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write over files of these names.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the tables of a run as CSV or JSON files.

    Example: esscher export runs/mine --to csv --out tables
    """
    from esscher.runs import export_run

    if to not in EXPORTS:
        raise ValueError(f"--to: expected one of {', '.join(EXPORTS)}, got {to!r}")
    files = [str(file) for file in export_run(run, to=to, out=out, overwrite=overwrite)]
    if as_json:
        return print_json(files)
    for file in files:
        log(file)


def cite(
    key: Annotated[str | None, typer.Argument(help="B or S; all when left out.")] = None,
    as_json: Json = False,
) -> None:
    """Print the BibTeX of the results esscher relies on.

    Example: esscher cite B
    """
    from esscher.theory import REFERENCES

    known: dict[str, Any] = {name.strip("[]"): entry for name, entry in REFERENCES.items()}
    if key is not None and key not in known:
        raise ValueError(f"key: expected one of {', '.join(known)}, got {key!r}")
    chosen = known if key is None else {key: known[key]}
    print_json(chosen) if as_json else print("\n\n".join(chosen.values()))
