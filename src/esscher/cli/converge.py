"""``esscher converge``: Monte Carlo on laws, from a preset, a YAML file and flags."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli import options
from esscher.cli.options import given, option, run_spec, switch
from esscher.cli.output import end_run, log, print_json, show
from esscher.errors.montecarlo.spec import ExperimentSpec, Sweep

if TYPE_CHECKING:
    from esscher.runs import Run


def converge(
    preset: Annotated[
        str | None, typer.Argument(help="A preset that --list names, or a YAML file.")
    ] = None,
    n: Annotated[str | None, option(ExperimentSpec, "n")] = None,
    repeats: Annotated[int | None, option(ExperimentSpec, "repeats", default="preset's")] = None,
    metrics: Annotated[str | None, option(ExperimentSpec, "metrics", default="mean,cov,l2")] = None,
    values: Annotated[str | None, option(Sweep, "values")] = None,
    seed: Annotated[int | None, option(ExperimentSpec, "seed")] = None,
    dtype: Annotated[str | None, option(ExperimentSpec, "dtype")] = None,
    device: Annotated[str | None, option(ExperimentSpec, "device")] = None,
    workers: options.Workers = 1,
    dask: options.Dask = None,
    out: options.Out = None,
    listing: Annotated[bool, switch("--list", "Name the presets and stop.")] = False,
    report: options.Report = True,
    everything: options.All = False,
    as_json: options.Json = False,
) -> None:
    """Sample tokens of a law, measure how fast attention converges, and compare with theory.

    Example: esscher converge gaussian --repeats 20 --workers 2
    """
    flags = given(locals())
    if listing or preset is None:
        return _list_presets(as_json)
    spec = _read(preset, given(flags, ExperimentSpec), values)
    options.check_device(spec.device)
    run = run_spec(spec, flags, Path(preset).stem)
    end_converge(run, as_json, everything=everything, report=report)


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


def end_converge(run: Run, as_json: bool, **how: Any) -> None:
    """Say why some rates of a finished sweep are doubtful, and all of them."""
    rates = run.table("rates")
    for reason in dict.fromkeys(rates.loc[~rates["status"].isin(["ok", "exact"]), "reason"]):
        log(f"note: {reason}")
    end_run(run, as_json, **how)


def _list_presets(as_json: bool) -> None:
    import yaml

    from esscher.errors.montecarlo.job import preset_names, read_preset

    texts = {name: read_preset(name) for name in preset_names()}
    if as_json:
        return print_json({name: yaml.safe_load(text) for name, text in texts.items()})
    first = {name: text.splitlines()[0].removeprefix("# ") for name, text in texts.items()}
    rows = [{"name": name, "what it shows": line} for name, line in first.items()]
    show("presets: esscher converge NAME", rows)
