"""``esscher converge``: Monte Carlo on laws, from a preset, a YAML file and flags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from esscher.cli.output import (
    Dask,
    Device,
    Json,
    Seed,
    Workers,
    check_device,
    figure_formats,
    log,
    number,
    path_option,
    print_json,
    print_table,
)
from esscher.cli.tables import Shown, show_table, shown

if TYPE_CHECKING:
    from esscher.runs import Run

__all__ = ["converge"]


def converge(
    preset: Annotated[str | None, typer.Argument(help="Name of a preset, or a YAML file.")] = None,
    out: Annotated[Path | None, path_option("--out", "Run directory; runs/NAME-HASH when left out.")] = None,
    n: Annotated[str | None, typer.Option(help="Token numbers: 1e3:3e4:12 or 100,1000.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Draws of the tokens.")] = None,
    metrics: Annotated[str | None, typer.Option(help="Which errors, separated by commas.")] = None,
    sampling: Annotated[str | None, typer.Option(help="nested or independent.")] = None,
    values: Annotated[str | None, typer.Option(help="Values of the sweep, separated by commas.")] = None,
    figures: Annotated[
        str, typer.Option(help="Figure formats: svg, png, pdf, separated by commas; empty for none.")
    ] = "svg,png",
    listing: Annotated[bool, typer.Option("--list", help="Name the presets and stop.")] = False,
    workers: Workers = 1,
    dask: Dask = None,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32 or float64.")] = None,
    as_json: Json = False,
) -> None:
    """Measure how fast attention converges on tokens of a law, fit the rates, and set them beside theory.

    Example: esscher converge gaussian --repeats 20 --workers 2
    """
    import yaml

    from esscher.convergence.montecarlo.job import read_preset
    from esscher.convergence.montecarlo.spec import ExperimentSpec
    from esscher.report.exponents import theory_lines
    from esscher.report.figures import save_rates
    from esscher.runs import execute, terminal
    from esscher.runs.spec import read_mapping

    if listing or preset is None:
        _list_presets(as_json)
        return
    name = Path(preset).stem
    settings = read_mapping(Path(preset)) if preset.endswith((".yaml", ".yml")) else yaml.safe_load(read_preset(preset))
    flags = {
        "n": n,
        "repeats": repeats,
        "metrics": metrics.split(",") if metrics is not None else None,
        "sampling": sampling,
        "dtype": dtype,
    }
    settings |= {key: value for key, value in flags.items() if value is not None}
    if values is not None:
        if not isinstance(settings.get("sweep"), dict):
            raise ValueError("--values: this experiment sweeps over nothing")
        settings["sweep"] = settings["sweep"] | {"values": _numbers(values)}
    check_device(device)
    spec = ExperimentSpec.model_validate(settings | {"seed": seed, "device": device})
    formats = figure_formats(figures)
    path = out if out is not None else Path("runs") / f"{name}-{spec.hash[:8]}"
    run = execute(spec, path, workers=workers, dask=dask, progress=terminal())
    rates, curves = run.table("rates"), run.table("curves") if "curves" in run.tables else None
    files = [path / f"rates.{kind}" for kind in formats]
    over = spec.sweep.over if spec.sweep is not None else ""
    for file in files:
        save_rates(curves, rates, theory_lines(run.columns("rates")), spec.title or name, over, file)
    if as_json:
        print_json({"run": str(path), "spec": spec.as_dict(), "rates": rates.to_dict("records")})
    else:
        show_rates(run, over)
        for file in files:
            log(f"figure: {file}")


THEORY = ("exact_exponent", "sharp", "bohbot_experimental", "bohbot")


def show_rates(run: Run, over: str) -> None:
    """The table of a run's rates, and the reasons of what could not be fitted."""
    rates, columns = run.table("rates"), run.columns("rates")
    rows = rates.to_dict("records")
    point = Shown(over or "-", tuple(number(row["value"], "g") if over else "" for row in rows), words=True)
    names = ["metric", "horizon2", "coupling", "exponent", "low", "high", *THEORY, "preferred_law", "status"]
    # the ends of the interval have columns of their own
    show_table(str(run.path), [point, *(shown(replace(columns[name], ends=None), rows, ".3g") for name in names)])
    for reason in dict.fromkeys(rates.loc[~rates["status"].isin(["ok", "exact"]), "reason"]):
        log(f"note: {reason}")


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as cause:
        raise ValueError(f"--values: expected numbers separated by commas, got {text!r}") from cause


def _list_presets(as_json: bool) -> None:
    import yaml

    from esscher.convergence.montecarlo.job import preset_names, read_preset

    found = {name: yaml.safe_load(read_preset(name)) for name in preset_names()}
    if as_json:
        print_json(found)
        return
    rows = [[name, str(spec["title"]), read_preset(name).splitlines()[0].removeprefix("# ")] for name, spec in found.items()]
    print_table("presets: esscher converge NAME", ["name", "title", "what it shows"], rows, left=3)
