"""``esscher converge``: Monte Carlo on laws, from a preset, a YAML file and flags."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.options import All, Dask, Workers, given, option
from esscher.cli.output import (
    FIGURES,
    ROWS,
    Figures,
    Json,
    Out,
    as_formats,
    check_device,
    log,
    log_files,
    print_json,
    print_run,
    say,
    show,
    show_tables,
)
from esscher.errors.montecarlo.spec import ExperimentSpec, Sweep
from esscher.runs.errors import printable

if TYPE_CHECKING:
    import pandas as pd

    from esscher.runs import Run

RATES = ("value", "metric", "exponent", "exact_exponent", "sharp", "status")


def converge(
    preset: Annotated[str | None, typer.Argument(help="Name of a preset, or a YAML file.")] = None,
    n: Annotated[str | None, option(ExperimentSpec, "n")] = None,
    repeats: Annotated[int | None, option(ExperimentSpec, "repeats", default="preset's")] = None,
    metrics: Annotated[str | None, option(ExperimentSpec, "metrics")] = None,
    values: Annotated[str | None, option(Sweep, "values")] = None,
    seed: Annotated[int | None, option(ExperimentSpec, "seed")] = None,
    dtype: Annotated[str | None, option(ExperimentSpec, "dtype")] = None,
    device: Annotated[str | None, option(ExperimentSpec, "device")] = None,
    workers: Workers = 1,
    dask: Dask = None,
    out: Out = None,
    figures: Figures = FIGURES,
    listing: Annotated[bool, typer.Option("--list", help="Name the presets and stop.")] = False,
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
    end_converge(run, as_json, everything, figures)


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


def end_converge(run: Run, as_json: bool, everything: bool = False, figures: str = FIGURES) -> None:
    """Draw the rates of a finished sweep and say what they are."""
    from esscher.report.figures import save_rates

    rates = run.table("rates")
    files = [run.path / f"rates.{kind}" for kind in as_formats(figures)]
    for file in files:
        save_rates(run, printable(run.spec["title"] or run.path.name), file)
    if as_json:
        return print_run(run, ["rates"])
    for metric, part in rates.groupby("metric", sort=False):
        say(_in_words(str(metric), part))
    if everything:
        show_tables(run, ["rates"])
    else:
        keys = [key for key in RATES if key in rates and (key != "value" or run.spec.get("sweep"))]
        ends = list(run.columns("rates")["exponent"].ends or ())
        show(f"rates: {run.path}", rates[keys + ends], run.columns("rates"), ROWS)
    for reason in dict.fromkeys(rates.loc[~rates["status"].isin(["ok", "exact"]), "reason"]):
        log(f"note: {reason}")
    log_files("figure", files)


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
