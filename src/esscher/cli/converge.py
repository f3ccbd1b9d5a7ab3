"""``esscher converge``: Monte Carlo on laws, from a preset, a YAML file and flags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.options import All, Dask, Markdown, Sort, Top, Workers, given, option
from esscher.cli.output import (
    FIGURES,
    Figures,
    Json,
    Out,
    as_formats,
    brief,
    check_device,
    log,
    print_json,
    say,
    show,
    show_tables,
)
from esscher.errors.montecarlo.spec import ExperimentSpec, Sweep
from esscher.runs.errors import printable

if TYPE_CHECKING:
    import pandas as pd

    from esscher.runs import Run

RATES = ("metric", "exponent", "low", "high", "exact_exponent", "sharp", "bohbot", "status")


def converge(
    preset: Annotated[str | None, typer.Argument(help="Name of a preset, or a YAML file.")] = None,
    n: Annotated[str | None, option(ExperimentSpec, "n")] = None,
    repeats: Annotated[int | None, option(ExperimentSpec, "repeats", default="preset's")] = None,
    metrics: Annotated[str | None, option(ExperimentSpec, "metrics")] = None,
    sampling: Annotated[str | None, option(ExperimentSpec, "sampling")] = None,
    query_inside: Annotated[bool, option(ExperimentSpec, "query_inside")] = False,
    values: Annotated[str | None, option(Sweep, "values")] = None,
    seed: Annotated[int | None, option(ExperimentSpec, "seed")] = None,
    dtype: Annotated[str | None, option(ExperimentSpec, "dtype")] = None,
    device: Annotated[str | None, option(ExperimentSpec, "device")] = None,
    workers: Workers = 1,
    dask: Dask = None,
    out: Out = None,
    figures: Figures = FIGURES,
    listing: Annotated[bool, typer.Option("--list", help="Name the presets and stop.")] = False,
    top: Top = None,
    sort: Sort = None,
    markdown: Markdown = False,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Sample tokens of a law, measure how fast attention converges, and compare with theory.

    Example: esscher converge gaussian --repeats 20 --workers 2
    """
    flags = given(locals())
    from esscher.runs import execute, terminal

    if listing or preset is None:
        return _list_presets(as_json)
    spec = _read(preset, given(flags, ExperimentSpec), values)
    as_formats(figures)  # a mistake is told before anything is computed
    check_device(spec.device)
    path = out if out is not None else Path("runs") / f"{Path(preset).stem}-{spec.hash[:8]}"
    run = execute(spec, path, workers=workers, dask=dask, progress=terminal())
    end_converge(run, as_json, flags, figures)


def _read(preset: str, changes: dict[str, Any], values: str | None) -> ExperimentSpec:
    """The spec that a preset or a file names, with flags before it."""
    import yaml

    from esscher.errors.montecarlo.job import read_preset
    from esscher.runs.spec import read_mapping

    is_file = preset.endswith((".yaml", ".yml"))
    found = read_mapping(Path(preset)) if is_file else yaml.safe_load(read_preset(preset))
    if "metrics" in changes:
        changes["metrics"] = changes["metrics"].split(",")
    if values is not None:
        if not isinstance(found.get("sweep"), dict):
            raise ValueError("--values: this experiment sweeps over nothing")
        try:
            numbers = [float(part) for part in values.split(",")]
        except ValueError as cause:
            raise ValueError(
                f"--values: expected numbers separated by commas, got {values!r}"
            ) from cause
        changes["sweep"] = found["sweep"] | {"values": numbers}
    return ExperimentSpec.model_validate({**found, **changes})


def end_converge(
    run: Run, as_json: bool, look: Mapping[str, Any] | None = None, figures: str = FIGURES
) -> None:
    """Draw the rates of a finished sweep and say what they are."""
    from esscher.report.figures import save_rates

    look = look or {}
    rates = run.table("rates")
    files = [run.path / f"rates.{kind}" for kind in as_formats(figures)]
    over = str((run.spec.get("sweep") or {}).get("over", ""))
    for file in files:
        save_rates(run, printable(run.spec["title"] or run.path.name), file)
    if as_json:
        rows = rates.to_dict("records")
        return print_json({"run": str(run.path), "spec": run.spec, "rates": rows})
    for metric, part in rates.groupby("metric", sort=False):
        say(_in_words(str(metric), part))
    if look.get("everything"):
        show_tables(run, ["rates"], look)
    else:
        keys = [key for key in (*(["value"] if over else []), *RATES) if key in rates]
        show(f"rates: {run.path}", rates[keys], run.columns("rates"), brief(look))
    for reason in dict.fromkeys(rates.loc[~rates["status"].isin(["ok", "exact"]), "reason"]):
        log(f"note: {reason}")
    for file in files:
        log(f"figure: {file}")


def _in_words(metric: str, rates: pd.DataFrame) -> str:
    """The exponents of one metric in a sentence."""
    fitted = rates[rates["exponent"].notna()]
    if fitted.empty:
        return f"{metric}: no rate could be fitted"
    low, high = fitted["exponent"].min(), fitted["exponent"].max()
    said = f"{metric}: error ~ n^-b with b = {low:.3g}" + ("" if low == high else f" to {high:.3g}")
    half = (fitted["low"].le(0.5) & fitted["high"].ge(0.5)).sum()
    said += f"; 1/2 is within the interval of {half} of {len(fitted)} points"
    exact = fitted[fitted["exact_exponent"].notna()]
    if len(exact):
        wanted = exact["exact_exponent"]
        inside = (exact["low"].le(wanted) & exact["high"].ge(wanted)).sum()
        said += f", the exact exponent within that of {inside} of {len(exact)}"
    return said


def _list_presets(as_json: bool) -> None:
    import yaml

    from esscher.errors.montecarlo.job import preset_names, read_preset

    found = {name: yaml.safe_load(read_preset(name)) for name in preset_names()}
    if as_json:
        return print_json(found)
    rows = [
        {
            "name": name,
            "title": str(spec["title"]),
            "what it shows": read_preset(name).splitlines()[0].removeprefix("# "),
        }
        for name, spec in found.items()
    ]
    show("presets: esscher converge NAME", rows)
