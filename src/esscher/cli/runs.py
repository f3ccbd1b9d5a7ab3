"""Commands about stored runs: ``ls``, ``resume``, ``report``, ``export``, ``fit``; and ``cite``."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli import options
from esscher.cli.options import switch
from esscher.cli.output import close, log, print_json, show
from esscher.runs.run import EXPORTS

if TYPE_CHECKING:
    from esscher.errors.curve import ErrorCurve
    from esscher.runs import Run

JOBS = {
    "converge": ("esscher.errors.montecarlo.spec", "esscher.cli.converge:end_converge"),
    "compress": ("esscher.compress.spec", "esscher.cli.output:end_run"),
    "evidence": ("esscher.papers.claim", "esscher.cli.reproduce:end_evidence"),
    "probe": ("esscher.probe.spec", "esscher.cli.probe:end_probe"),
}
"""Job of a run -> the module that registers it, and the function that ends its command."""
for _name in ("concentration", "flow", "stability", "train"):
    JOBS[f"icl-{_name}"] = ("esscher.icl.specs", "esscher.cli.icl:end_icl")


def ls(
    folder: Annotated[
        Path, options.path_argument("Folder that holds run directories.", "FOLDER")
    ] = Path(),
    as_json: options.Json = False,
) -> None:
    """List runs with their status and how much of them is done.

    Example: esscher ls runs
    """
    from esscher.runs import list_runs

    records = []
    for run in list_runs(folder):
        row: dict[str, Any] = {"path": str(run.path), "job": run.manifest.job}
        title = run.spec.get("title") or run.spec.get("model") or ""
        row |= {"title": str(title), "status": run.status}
        row |= {"done": run.progress.done, "units": run.manifest.units}
        row |= {"failed": len(run.failures), "started": run.manifest.started[:19]}
        records.append(row)
    if as_json:
        print_json(records)
    elif not records:
        log(f"no runs in {folder}")
    else:
        shown = ("path", "job", "title", "status")
        show("", [{key: row[key] for key in shown} | _short(row) for row in records])


def _short(row: dict[str, Any]) -> dict[str, str]:
    """What is done, and when it began, in columns that fit a terminal."""
    failed = f", {row['failed']} failed" if row["failed"] else ""
    began = row["started"][:16].replace("T", " ")
    return {"units": f"{row['done']}/{row['units']}{failed}", "started": began}


def resume(
    run: Annotated[Path, options.path_argument("Run directory.")],
    workers: options.Workers = 1,
    dask: options.Dask = None,
    everything: options.All = False,
    as_json: options.Json = False,
) -> None:
    """Complete a run that was interrupted.

    Finished units are skipped; failed and damaged ones are computed again. At the end it writes the
    report and prints what the command that began the run prints.

    Example: esscher resume runs/mine --workers 2
    """
    from esscher import runs

    for module, _ in JOBS.values():
        importlib.import_module(module)
    result = runs.resume(run, workers=workers, dask=dask, progress=runs.terminal())
    log(f"{result.path}: {result.status}, tables {', '.join(result.tables)}")
    if result.manifest.job in JOBS:
        module, _, name = JOBS[result.manifest.job][1].partition(":")
        getattr(importlib.import_module(module), name)(result, as_json, everything=everything)
    elif as_json:  # a job of another package
        print_json({"path": str(result.path), "status": result.status, "tables": result.tables})


def report(
    runs: Annotated[list[Path], options.path_argument("Run directories; several are compared.")],
    out: Annotated[
        Path | None,
        options.path_option("--out", "File of the page (default: report.html in the first run)."),
    ] = None,
    figures: Annotated[
        str,
        switch(
            "--figures", "Also write figures into RUN/figures: svg, pdf, png, separated by commas."
        ),
    ] = "",
    as_json: options.Json = False,
) -> None:
    """Write runs as one HTML page that works offline; several runs are compared.

    Example: esscher report runs/mine --figures svg,pdf
    """
    from esscher.report import write_report
    from esscher.report.figures import FORMATS, save_figures
    from esscher.runs import load_run

    formats = [kind.strip() for kind in figures.split(",") if kind.strip()]
    if unknown := [kind for kind in formats if kind not in FORMATS]:
        told = ", ".join(unknown)
        raise ValueError(f"--figures: expected some of {', '.join(FORMATS)}, got {told}")
    loaded = [load_run(path) for path in runs]
    page = write_report(loaded, out)
    kept = loaded if formats else []
    written = [file for run in kept for file in save_figures(run, formats, run.path / "figures")]
    if as_json:
        return print_json({"page": str(page), "figures": [str(file) for file in written]})
    for kind, file in [("page", page), *(("figure", file) for file in written)]:
        log(f"{kind}: {file}")


def export(
    run: Annotated[Path, options.path_argument("Run directory.")],
    to: Annotated[str, switch("--to", f"Format: {', '.join(EXPORTS)}.")] = "csv",
    out: Annotated[Path, options.path_option("--out", "Folder to write to.")] = Path("export"),
    overwrite: Annotated[bool, switch("--overwrite", "Overwrite existing files.")] = False,
    as_json: options.Json = False,
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
    key: Annotated[str | None, typer.Argument(help="B or S (default: both).")] = None,
    as_json: options.Json = False,
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


# ---- Rates of a stored run.

RATE = ("value", "head", "metric", "exponent", "low", "high", "status")
METRICS = ("l2", "mean", "cov")  # of a probe's curves


def fit(
    run: Annotated[Path, options.path_argument("Run directory of esscher converge or probe.")],
    window: Annotated[
        str | None, switch("--window", "Smallest and largest n, 100:10000 (default: every n).")
    ] = None,
    everything: options.All = False,
    as_json: options.Json = False,
) -> None:
    """Fit a rate, error ~ constant * n^-exponent, to the stored curves of a run.

    The exponents that a probe found itself, with intervals for more text, are in its table heads.

    Example: esscher fit runs/mine --window 100:10000
    """
    from esscher.errors.rate import fit_rate
    from esscher.runs import load_run

    stored = load_run(run)
    ends: Any = "auto"
    if stored.manifest.job not in ("converge", "probe"):
        job = stored.manifest.job
        raise ValueError(f"{run}: expected a run of esscher converge or probe, got one of {job}")
    if window is not None:
        try:
            low, high = (float(part) for part in window.split(":"))
        except ValueError as cause:
            told = f"--window: expected two numbers such as 100:10000, got {window!r}"
            raise ValueError(told) from cause
        ends = (low, high)
    rows = []
    for name, curve in _curves(stored):
        found = fit_rate(curve, window=ends, raise_on_failure=False)
        low, high = found.interval
        row = name | {"metric": curve.metric, "exponent": found.exponent, "low": low, "high": high}
        row |= {"status": found.status.code, "constant": found.constant}
        row |= {"n_min": found.window.n_min, "n_max": found.window.n_max}
        rows.append(row | {"straightness_p": found.p_value, "reason": found.status.text})
    if as_json:
        return print_json(rows)
    if not rows:
        raise ValueError(f"{run}: no curves to fit in this run")
    states = ", ".join(
        f"{n} {status}" for status, n in Counter(row["status"] for row in rows).items()
    )
    known = sorted(row["exponent"] for row in rows if row["exponent"] == row["exponent"])
    said = [f"{run}: {len(known)} of {len(rows)} curves have a rate (status: {states})"]
    if known:
        middle = known[len(known) // 2]
        said.append(f"error ~ n^-b, b from {known[0]:.3g} to {known[-1]:.3g}, median {middle:.3g}")
    if everything:
        show(str(run), rows)
    close(said, rows, RATE, everything=everything)


def _curves(stored: Run) -> Iterator[tuple[dict[str, Any], ErrorCurve]]:
    """The curves of a run, each with its name; those of a sweep from their repeats."""
    if stored.manifest.job == "converge":
        from esscher.errors.montecarlo.job import curves_of
        from esscher.errors.montecarlo.spec import ExperimentSpec

        spec, errors = ExperimentSpec.read(stored.spec), stored.table("errors")
        for point in sorted(set(errors["point"])):
            for curve in curves_of(spec, point, errors[errors["point"] == point]).values():
                yield {"value": spec.points[point]}, curve
        return
    from esscher.probe.curves import stored_curves
    from esscher.probe.moments import WHOLE_LAYER

    for metric in METRICS:
        for (layer, head), curve in stored_curves(stored.table("curves"), metric).items():
            yield {"head": f"{layer}, all" if head == WHOLE_LAYER else f"{layer}.{head}"}, curve
