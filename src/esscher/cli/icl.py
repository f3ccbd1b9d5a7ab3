"""``esscher icl``: softmax against linear attention on linear regression in context."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.options import Dask, Workers, given, option
from esscher.cli.output import (
    FIGURES,
    Figures,
    Json,
    Out,
    as_formats,
    log,
    number,
    path_argument,
    path_option,
    print_json,
    say,
    show,
)
from esscher.icl.specs import (
    ConcentrationSpec,
    FlowSpec,
    LengthFlags,
    RiskFlags,
    StabilitySpec,
    TrainSpec,
    choose_figures,
    specs_for,
)

if TYPE_CHECKING:
    import pandas as pd

    from esscher.icl.specs import IclFigure
    from esscher.runs import Run, RunSpec

icl = typer.Typer(
    help=(
        "In-context learning: softmax against linear attention at any prompt length.\n\n"
        "Example: esscher icl flow --lengths 10,1000,1e6"
    ),
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

BOTH = "isotropic kms:0.5"
LENGTHS = "10,100,1000"
Covariance = Annotated[
    str | None, option(FlowSpec, "covariances", flag="--covariance", default=BOTH)
]
Lengths = Annotated[str | None, option(TrainSpec, "lengths", default=LENGTHS)]
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
    workers: Workers = 1,
    dask: Dask = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Train softmax and linear attention from the same weights on the same prompts; the defaults
    are the paper's.

    Example: esscher icl train --lengths 10 --steps 20000 --seeds 1
    """
    end_train(_execute(TrainSpec, locals()), as_json)


def end_train(run: Run, as_json: bool) -> None:
    """Show what training ended with."""
    final = _final(run)
    lost = final[final["status"] != "ok"]
    if (final["status"] == "diverged").all():
        raise ValueError("; ".join(dict.fromkeys(lost["advice"])))
    shown = final[["covariance", "length", "seed", "model", "mse", "stderr", "status", "step"]]
    _show(run, "final", shown, as_json)
    for row in lost.to_dict("records"):
        log(f"note: {row['covariance']}, L = {row['length']}, seed {row['seed']}: {row['advice']}")


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
    workers: Workers = 1,
    dask: Dask = None,
    figures: Figures = FIGURES,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Where gradient flow ends, against the prompt length: mean squared error of both models and of
    Bayes on L tokens.

    Example: esscher icl flow --lengths 10,1000,1e6
    """
    as_formats(figures)  # a mistake is told before anything is computed
    end_flow(_execute(FlowSpec, locals()), as_json, figures)


def end_flow(run: Run, as_json: bool, figures: str = FIGURES) -> None:
    """Draw and show the ends of the flows."""
    from esscher.report.icl import risk_chart, save_charts

    final = run.table("final")
    above = final.assign(mse=final["mse"] - float(run.spec["noise"])).groupby("covariance")
    error = "mean squared error above the noise"
    charts = [risk_chart(str(name), flow=own, y=error) for name, own in above]
    _show(run, "final", final, as_json)
    for kind in as_formats(figures):
        save_charts(charts, run.path / f"flow.{kind}")
        log(f"figure: {run.path / f'flow.{kind}'}")


@icl.command("risk")
def show_risk(
    run: Annotated[
        Path | None, path_argument("A run of esscher icl train: its models are evaluated exactly.")
    ] = None,
    covariances: Covariance = None,
    lengths: Lengths = None,
    dim: Dim = None,
    noise: Noise = None,
    task_cov: TaskCov = None,
    as_json: Json = False,
) -> None:
    """Exact mean squared errors: of the models a training run left, beside the flow; or, in parts,
    where the flow of each model ends.

    Example: esscher icl risk --lengths 10,1e6
    """
    flags = given(locals(), RiskFlags)
    import pandas as pd

    from esscher.icl.exact import decompose
    from esscher.icl.flow import final_parameters, start_block
    from esscher.icl.layer import KINDS
    from esscher.icl.stability import flow_ends, trained_risks

    if run is not None:
        stored = _training_run(run)
        final, spec = _final(stored), TrainSpec.read(stored.spec)
        trained = trained_risks(spec, final, flow_ends(spec, final))
        return _show(None, "trained", trained, as_json)
    asked = RiskFlags.model_validate(flags)
    rows = []
    for name in asked.covariances:
        task = asked.task(name)
        for length in asked.lengths:
            for kind in KINDS:
                end = final_parameters(task, start_block(task), length, kind)
                parts = decompose(task, end, length, kind)
                row = {"covariance": name, "length": length, "model": kind, "mse": 2 * parts.total}
                row |= {"noise": 2 * parts.noise, "approximation": 2 * parts.approximation}
                rows.append(row | {"bias": 2 * parts.bias, "variance": 2 * parts.variance})
    return _show(None, "risk", pd.DataFrame(rows), as_json)


@icl.command()
def length(
    epsilon: Annotated[str | None, option(LengthFlags, "epsilon", default="0.01")] = None,
    covariances: Covariance = None,
    dim: Dim = None,
    noise: Noise = None,
    task_cov: TaskCov = None,
    as_json: Json = False,
) -> None:
    """L(epsilon) of Theorem 5.2: the shortest prompts on which gradient flow ends within epsilon of
    the best risk.

    Example: esscher icl length --epsilon .1,.01 --task-cov identity --noise 0
    """
    asked = LengthFlags.model_validate(given(locals(), LengthFlags))
    import pandas as pd

    from esscher.icl.flow import prompt_length_for
    from esscher.icl.layer import KINDS

    rows = [
        {"covariance": name, "model": kind, "epsilon": goal}
        | {"length": prompt_length_for(asked.task(name), goal, kind)}
        for name in asked.covariances
        for goal in asked.epsilon
        for kind in KINDS
    ]
    _show(None, "shortest prompts", pd.DataFrame(rows), as_json)


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
    workers: Workers = 1,
    dask: Dask = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """How fast outputs and gradients of softmax attention become those of linear attention, at the
    first weights.

    Example: esscher icl concentration --lengths 10,100,1000 --covariance isotropic
    """
    end_concentration(_execute(ConcentrationSpec, locals()), as_json)


def end_concentration(run: Run, as_json: bool) -> None:
    """Show the fitted rates."""
    shown = ["covariance", "metric", "against", "exponent", "low", "high", "status"]
    _show(run, "rates", run.table("rates")[shown], as_json)


@icl.command()
def figures(
    out: Annotated[Path, path_option("--out", "Folder for figures and their runs.")],
    training: Annotated[
        Path | None, path_option("--train", "A run of esscher icl train to use.")
    ] = None,
    formats: Annotated[
        str, typer.Option(help="Figure formats: svg, png, pdf, separated by commas.")
    ] = FIGURES,
    only: Annotated[
        str | None, typer.Option(help="Some figures: fig2,fig3; all when left out.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Minutes instead of the paper's size.")
    ] = False,
    seed: Seed = None,
    workers: Workers = 1,
    dask: Dask = None,
    as_json: Json = False,
) -> None:
    """Make Figures 1 to 8 of the paper from stored runs, which are started or completed first.

    Example: esscher icl figures --quick --only fig2,fig3 --out figures
    """
    from esscher.report.icl import save_charts

    chosen, kinds = choose_figures(only), as_formats(formats)
    runs = {} if training is None else {"train": _training_run(training)}
    out.mkdir(parents=True, exist_ok=True)
    for name, spec in specs_for(chosen, quick, seed or 0).items():
        if name not in runs:
            log(f"{name}: {out / 'runs' / name}")
            runs[name] = _run(spec, out / "runs" / name, workers, dask)
    files = []
    for figure in chosen:
        charts = _charts(figure, runs)
        for kind in kinds:
            files.append(out / f"{figure.name}.{kind}")
            save_charts(charts, files[-1], figure.title)
    if as_json:
        paths = {name: str(run.path) for name, run in runs.items()}
        print_json({"figures": [str(file) for file in files], "runs": paths})
    for file in files:
        log(f"figure: {file}")


def _charts(figure: IclFigure, runs: dict[str, Run]) -> list[dict[str, Any]]:
    """The charts of one figure from the tables of its runs."""
    from esscher.report import icl as charts

    def table(run: str, name: str) -> Any:
        found = _table(runs[run], name)
        return found[found["covariance"] == figure.covariance]

    if figure.shows == "concentration":
        curves, rates, bounds = (
            table("concentration", name) for name in ("curves", "rates", "bounds")
        )
        drawn = curves[curves["metric"].isin(["output", "gradient", "risk_gradient"])]
        return charts.concentration_charts(drawn, rates, bounds)
    flow = table("flow", "final") if "flow" in figure.runs else None
    final = _final(runs["train"], flow)
    own = final[final["covariance"] == figure.covariance]
    if own.empty:
        raise ValueError(
            f"{figure.name}: {runs['train'].path} holds no training for {figure.covariance}"
        )
    left_out = "left out" if "flow" in figure.runs else "drawn as a line of its own"
    for row in own[own["status"] != "ok"].to_dict("records"):
        kept = "drawn, and still on its way" if row["status"] == "undertrained" else left_out
        log(
            f"{figure.name}: L = {row['length']}, seed {row['seed']}: {row['status']}, {kept};"
            f" {row['advice']}"
        )
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
    training: Annotated[float | None, option(StabilitySpec, "training")] = None,
    until: Annotated[float | None, option(StabilitySpec, "until")] = None,
    dim: Dim = None,
    noise: Noise = None,
    task_cov: TaskCov = None,
    seed: Seed = None,
    workers: Workers = 1,
    dask: Dask = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Which first weights get stuck: gradient flow of (O, V, K, Q) for both models from the same
    starts, and a test.

    Example: esscher icl stability --starts 10 --lengths 10,100
    """
    end_stability(_execute(StabilitySpec, locals()), as_json)


def end_stability(run: Run, as_json: bool) -> None:
    """Show the verdict, and say it in a sentence."""
    from esscher.icl.stability import ALL

    verdict = run.table("verdict")
    if not as_json:
        total = verdict[verdict["covariance"] == ALL].to_dict("records")[0]
        more = "linear" if total["only_linear"] > total["only_softmax"] else "softmax"
        told = "neither model is shown to be stuck more often"
        if total["p"] < 0.05:
            told = f"{more} attention is stuck more often"
        test = f"sign test over {total['starts']} starts, p = {number(total['p'])}"
        say(f"over all settings: {told} ({test})")
    _show(run, "verdict", verdict, as_json)


def _execute(kind: type[RunSpec], flags: Mapping[str, Any]) -> Run:
    """Run the spec that the flags of a command give."""
    spec = kind.model_validate(given(flags, kind))
    return _run(spec, flags.get("out"), flags["workers"], flags.get("dask"))


def _run(spec: RunSpec, out: Path | None, workers: int, dask: str | None) -> Run:
    from esscher.runs import execute, terminal

    path = out if out is not None else Path("runs") / f"{spec.job}-{spec.hash[:8]}"
    return execute(spec, path, workers=workers, dask=dask, progress=terminal())


def _table(run: Run, name: str) -> pd.DataFrame:
    return run.table(name) if name in run.tables else run.partial(name)


def _training_run(path: Path) -> Run:
    from esscher.runs import load_run

    run = load_run(path)
    if run.manifest.job != "icl-train":
        raise ValueError(
            f"{run.path}: expected a run of esscher icl train, got one of job {run.manifest.job}"
        )
    return run


def _final(run: Run, flow: pd.DataFrame | None = None) -> pd.DataFrame:
    """What training left, each model with the status that the end of its flow gives it."""
    from esscher.icl.stability import flow_ends, judged

    final = _table(run, "final")
    ends = flow_ends(TrainSpec.read(run.spec), final) if flow is None else flow
    return judged(final, _table(run, "curve"), ends)


def _show(run: Run | None, name: str, table: pd.DataFrame, as_json: bool) -> None:
    """A table for machines, or for people below what it says of the errors of the models at the
    longest prompt.
    """
    if as_json:
        head = {} if run is None else {"run": str(run.path), "spec": run.spec}
        return print_json(head | {name: table.to_dict("records")})
    if {"covariance", "length", "model", "mse"} <= set(table.columns):
        longest = table["length"].max()
        for covariance, rows in table[table["length"] == longest].groupby("covariance", sort=False):
            errors = rows.groupby("model", sort=False)["mse"].mean()
            told = ", ".join(f"{model} {number(value)}" for model, value in errors.items())
            say(f"{covariance}, prompts of {longest:,} tokens: mean squared error {told}")
    # short names for headers, but the table with intervals
    columns = run.columns(name) if run is not None and name == "verdict" else None
    show(name if run is None else f"{name}: {run.path}", table, columns)
