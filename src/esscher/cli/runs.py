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
    "compress": ("esscher.compress.spec", "esscher.cli.compress:end_compress"),
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
    run: Annotated[Path, options.path_argument("Run directory.")],
    workers: options.Workers = 1,
    dask: options.Dask = None,
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
        getattr(importlib.import_module(module), name)(result, as_json)
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


# ---- Rates of a stored run, or those over another range of token numbers.

RATE = ("value", "head", "metric", "exponent", "low", "high", "status")
EXPONENTS = {"l2": "beta_fit", "mean": "beta_mean", "cov": "beta_cov"}  # of a probe, by metric


def fit(
    run: Annotated[Path, options.path_argument("Run directory of esscher converge or probe.")],
    window: Annotated[
        str | None, switch("--window", "Smallest and largest n, 100:10000 (default: stored rates).")
    ] = None,
    everything: options.All = False,
    as_json: options.Json = False,
) -> None:
    """Show the exponents of a run, error ~ constant * n^-exponent, or fit its curves again.

    Without --window it shows the exponents that the run stored. Their intervals: 90 % for more text
    (the l2 error of a probe), 95 % over repeats (all others).

    Example: esscher fit runs/mine --window 100:10000
    """
    import pandas as pd

    from esscher.report.words import Answer
    from esscher.runs import load_run

    stored = load_run(run)
    job = stored.manifest.job
    if job not in ("converge", "probe"):
        raise ValueError(f"{run}: expected a run of esscher converge or probe, got one of {job}")
    if window is not None:
        try:
            low, high = (float(part) for part in window.split(":"))
        except ValueError as cause:
            told = f"--window: expected two numbers such as 100:10000, got {window!r}"
            raise ValueError(told) from cause
        rows = [*_fitted(_curves(stored), (low, high))]
    elif job == "converge":
        rates = stored.table("rates")
        rows = rates[[key for key in (*RATE, "reason") if key in rates]].to_dict("records")
    else:
        rows = [*_of_probe(stored)]
    if as_json:
        return print_json(rows)
    if not rows:
        raise ValueError(f"{run}: no curves to fit in this run")
    found = sorted(row["exponent"] for row in rows if row["exponent"] == row["exponent"])
    states = Counter(row["status"] for row in rows).most_common()
    told = ", ".join(f"{count} {status}" for status, count in states)
    said = [f"{run}: {len(found)} of {len(rows)} curves have a rate (status: {told})"]
    if found:
        middle = found[len(found) // 2]
        said.append(f"error ~ n^-b, b from {found[0]:.3g} to {found[-1]:.3g}, median {middle:.3g}")
    if everything:
        show(str(run), rows)
    table = pd.DataFrame(rows)
    close(Answer(said, table, [key for key in RATE if key in table]), {}, everything=everything)


def _of_probe(stored: Run) -> Iterator[dict[str, Any]]:
    """The exponents that a probe stored, of heads and of layers with their heads side by side."""
    tables = [stored.table(name) for name in ("heads", "layers") if name in stored.tables]
    for row in (row for table in tables for row in table.to_dict("records")):
        for metric, key in EXPONENTS.items():
            if key in row:
                low, high = (row[f"{key.removesuffix('_fit')}_{end}"] for end in ("low", "high"))
                name = f"{row['layer']}.{row['head']}" if "head" in row else f"{row['layer']}, all"
                found = {"head": name, "metric": metric, "exponent": row[key], "low": low}
                yield found | {"high": high, "status": "ok" if row[key] == row[key] else "none"}


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

    for metric in EXPONENTS:
        for (layer, head), curve in stored_curves(stored.table("curves"), metric).items():
            yield {"head": f"{layer}, all" if head == WHOLE_LAYER else f"{layer}.{head}"}, curve


def _fitted(
    curves: Iterator[tuple[dict[str, Any], ErrorCurve]], window: tuple[float, float]
) -> Iterator[dict[str, Any]]:
    from esscher.errors.rate import fit_rate

    for name, curve in curves:
        found = fit_rate(curve, window=window, raise_on_failure=False)
        yield {
            **name,
            "metric": curve.metric,
            "exponent": found.exponent,
            "low": found.interval[0],
            "high": found.interval[1],
            "status": found.status.code,
            "constant": found.constant,
            "n_min": found.window.n_min,
            "n_max": found.window.n_max,
            "straightness_p": found.p_value,
            "reason": found.status.text,
        }
