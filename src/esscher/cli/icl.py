"""``esscher icl``: softmax against linear attention on linear regression in context."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli import options
from esscher.cli.app import SETTINGS
from esscher.cli.options import given, option, run_spec, switch
from esscher.cli.output import end_run, log, print_json, show
from esscher.icl.specs import (
    ConcentrationSpec,
    FlowSpec,
    LengthFlags,
    StabilitySpec,
    TrainSpec,
    choose_figures,
    specs_for,
)

if TYPE_CHECKING:
    from esscher.icl.specs import IclFigure
    from esscher.runs import Run, RunSpec

icl = typer.Typer(
    help=(
        "In-context learning: softmax against linear attention at any prompt length.\n\n"
        "Example: esscher icl flow --lengths 10,1000,1e6"
    ),
    no_args_is_help=True,
    **SETTINGS,
)

Covariance = Annotated[
    str | None,
    option(FlowSpec, "covariances", flag="--covariance", default="isotropic kms:0.5"),
]
Lengths = Annotated[str | None, option(TrainSpec, "lengths", default="10,100,1000")]
Dim = Annotated[int | None, option(FlowSpec, "dim")]
Noise = Annotated[float | None, option(FlowSpec, "noise")]
TaskCov = Annotated[str | None, option(FlowSpec, "task_cov")]
Seed = Annotated[int | None, option(FlowSpec, "seed")]


@icl.command()
def train(
    covariances: Covariance = None,
    lengths: Lengths = None,
    seeds: Annotated[int | None, option(TrainSpec, "seeds")] = None,
    steps: Annotated[int | None, option(TrainSpec, "steps")] = None,
    batch: Annotated[int | None, option(TrainSpec, "batch")] = None,
    rate: Annotated[float | None, option(TrainSpec, "rate")] = None,
    dim: Dim = None,
    noise: Noise = None,
    task_cov: TaskCov = None,
    seed: Seed = None,
    device: Annotated[str | None, option(TrainSpec, "device")] = None,
    workers: options.Workers = 1,
    dask: options.Dask = None,
    out: options.Out = None,
    everything: options.All = False,
    as_json: options.Json = False,
) -> None:
    """Train softmax and linear attention from the same weights on the same prompts; the defaults
    are the paper's.

    Example: esscher icl train --lengths 10 --steps 20000 --seeds 1
    """
    options.check_device(device or "cpu")
    _run(TrainSpec, locals())


@icl.command()
def flow(
    covariances: Covariance = None,
    lengths: Annotated[
        str | None, option(FlowSpec, "lengths", default="10,30,100,300,1000,1e4,1e5,1e6")
    ] = None,
    dim: Dim = None,
    noise: Noise = None,
    task_cov: TaskCov = None,
    seed: Seed = None,
    out: options.Out = None,
    everything: options.All = False,
    as_json: options.Json = False,
) -> None:
    """Compute where gradient flow ends at each prompt length: mean squared error of both models and
    of the Bayes predictor.

    Example: esscher icl flow --lengths 10,1000,1e6
    """
    _run(FlowSpec, locals())


@icl.command()
def length(
    epsilon: Annotated[str | None, option(LengthFlags, "epsilon", default="0.01")] = None,
    covariances: Covariance = None,
    dim: Dim = None,
    noise: Noise = None,
    task_cov: TaskCov = None,
    as_json: options.Json = False,
) -> None:
    """Find L(epsilon) of Theorem 5.2: the shortest prompt for which gradient flow ends within
    epsilon of the best risk.

    Example: esscher icl length --epsilon .1,.01 --task-cov identity --noise 0
    """
    asked = LengthFlags.model_validate(given(locals(), LengthFlags))
    from esscher.icl.flow import prompt_length_for
    from esscher.icl.layer import KINDS

    rows = []
    for name, goal, kind in itertools.product(asked.covariances, asked.epsilon, KINDS):
        log(f"{name}, {kind} attention, epsilon {goal:g}")
        found = prompt_length_for(asked.task(name), goal, kind)
        rows.append({"covariance": name, "model": kind, "epsilon": goal, "length": found})
    print_json({"shortest prompts": rows}) if as_json else show("shortest prompts", rows)


@icl.command()
def concentration(
    covariances: Covariance = None,
    lengths: Annotated[
        str | None,
        option(ConcentrationSpec, "lengths", default="10,30,100,300,1000,3000,1e4,3e4,1e5"),
    ] = None,
    repeats: Annotated[int | None, option(ConcentrationSpec, "repeats")] = None,
    prompts: Annotated[int | None, option(ConcentrationSpec, "prompts")] = None,
    dim: Dim = None,
    noise: Noise = None,
    task_cov: TaskCov = None,
    seed: Seed = None,
    out: options.Out = None,
    everything: options.All = False,
    as_json: options.Json = False,
) -> None:
    """Measure how fast outputs and gradients of softmax attention converge to those of linear
    attention, at the initial weights.

    Example: esscher icl concentration --lengths 10,100,1000 --covariance isotropic
    """
    _run(ConcentrationSpec, locals())


@icl.command()
def figures(
    out: Annotated[Path, options.path_option("--out", "Folder for figures and their runs.")],
    training: Annotated[
        Path | None, options.path_option("--train", "A run of esscher icl train to use.")
    ] = None,
    only: Annotated[
        str | None, switch("--only", "Figures to make, e.g. fig2,fig3 (default: all).")
    ] = None,
    quick: Annotated[bool, switch("--quick", "Smaller settings, in two minutes.")] = False,
    seed: Seed = None,
    workers: options.Workers = 1,
    dask: options.Dask = None,
    as_json: options.Json = False,
) -> None:
    """Make Figures 1 to 8 of the paper from stored runs, which are started or completed first.

    Example: esscher icl figures --quick --only fig2,fig3 --out figures
    """
    from esscher.report.figures import save_charts
    from esscher.runs import load_run

    chosen, files = choose_figures(only), []
    runs = {} if training is None else {"train": load_run(training)}
    out.mkdir(parents=True, exist_ok=True)
    for name, spec in specs_for(chosen, quick, seed or 0).items():
        if name not in runs:
            log(f"{name}: {out / 'runs' / name}")
            where = {"out": out / "runs" / name, "workers": workers, "dask": dask}
            runs[name] = run_spec(spec, where)
    for figure in chosen:
        charts = _charts(figure, runs)
        for kind in ("svg", "png"):
            files.append(out / f"{figure.name}.{kind}")
            save_charts(charts, files[-1], figure.title)
    if as_json:
        paths = {name: str(run.path) for name, run in runs.items()}
        print_json({"figures": [str(file) for file in files], "runs": paths})
    for file in files:
        log(f"figure: {file}")


def _charts(figure: IclFigure, runs: dict[str, Run]) -> list[dict[str, Any]]:
    """The charts of one figure from the tables of its runs."""
    from esscher.report import charts

    def table(run: str, name: str) -> Any:
        found = runs[run].table(name)
        return found[found["covariance"] == figure.covariance]

    if figure.shows == "concentration":
        tables = [table("concentration", name) for name in ("curves", "rates", "bounds")]
        tables[0] = tables[0][tables[0]["metric"].isin(["output", "gradient", "risk_gradient"])]
        return charts.concentration_charts(*tables)
    flow = table("flow", "final") if "flow" in figure.runs else None
    own = table("train", "final")
    if own.empty:
        raise ValueError(
            f"{figure.name}: {runs['train'].path} holds no training for {figure.covariance}"
        )
    left_out = "left out" if "flow" in figure.runs else "drawn as a line of its own"
    for row in own[own["status"] != "ok"].to_dict("records"):
        kept = "drawn, and still on its way" if row["status"] == "undertrained" else left_out
        place = f"{figure.name}: L = {row['length']}, seed {row['seed']}"
        log(f"{place}: {row['status']}, {kept}; {row['advice']}")
    if flow is None:
        return [charts.distance_chart("", table("train", "distance"))]
    there = own[own["status"].isin(["ok", "undertrained"])]
    if figure.shows == "final":
        return [charts.risk_chart("", there, flow)]
    keys = there[["covariance", "length", "seed", "model"]]
    return [charts.training_chart("", table("train", "curve").merge(keys), flow)]


@icl.command()
def stability(
    covariances: Covariance = None,
    lengths: Lengths = None,
    starts: Annotated[int | None, option(StabilitySpec, "starts")] = None,
    dim: Dim = None,
    noise: Noise = None,
    task_cov: TaskCov = None,
    seed: Seed = None,
    workers: options.Workers = 1,
    dask: options.Dask = None,
    out: options.Out = None,
    everything: options.All = False,
    as_json: options.Json = False,
) -> None:
    """Find which initial weights get stuck: gradient flow of (O, V, K, Q) for both models, and a
    sign test between them.

    Example: esscher icl stability --starts 10 --lengths 10,100
    """
    _run(StabilitySpec, locals())


def _run(kind: type[RunSpec], flags: Mapping[str, Any]) -> None:
    """Run the spec that the flags of a command give, and print what was found."""
    run = run_spec(kind.model_validate(given(flags, kind)), flags)
    end_icl(run, flags["as_json"], everything=flags["everything"])


def end_icl(run: Run, as_json: bool, **how: Any) -> None:
    """Say which models of a training did not arrive, and print what the run found."""
    if run.manifest.job == "icl-train":
        table = run.table("final")
        lost = table[table["status"] != "ok"]
        if (table["status"] == "diverged").all():
            raise ValueError("; ".join(dict.fromkeys(lost["advice"])))
        for row in lost.to_dict("records"):
            place = f"{row['covariance']}, L = {row['length']}, seed {row['seed']}"
            log(f"note: {place}: {row['advice']}")
    end_run(run, as_json, **how)
