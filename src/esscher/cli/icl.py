"""``esscher icl``: softmax against linear attention on linear regression in context."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.output import (
    Dask,
    Json,
    Seed,
    Workers,
    figure_formats,
    log,
    number,
    path_argument,
    path_option,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    import pandas as pd

    from esscher.icl.figures import IclFigure
    from esscher.runs import Run, RunSpec

__all__ = ["icl"]

icl = typer.Typer(
    help="In-context learning: softmax against linear attention at any prompt length.\n\n"
    "Example: esscher icl flow --lengths 10,1000,1e6",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Covariance = Annotated[
    str, typer.Option("--covariance", help="isotropic, kms:RHO or diag:A,B,...; several separated by spaces.")
]
Lengths = Annotated[str, typer.Option("--lengths", help="Prompt lengths: 10,100,1000 or 10:1e4:7.")]
Dim = Annotated[int, typer.Option("--dim", help="Dimension of the covariates.")]
Noise = Annotated[float, typer.Option("--noise", help="Variance of the label noise.")]
Out = Annotated[Path | None, path_option("--out", "Run directory; runs/NAME-HASH when left out.")]
BOTH = "isotropic kms:0.5"


@icl.command()
def train(
    covariance: Covariance = BOTH,
    lengths: Lengths = "10,100,1000",
    seeds: Annotated[int, typer.Option(help="Numbers of first weights.")] = 3,
    steps: Annotated[int, typer.Option(help="Steps of SGD.")] = 500_000,
    batch: Annotated[int, typer.Option(help="Prompts in a step.")] = 128,
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    optimizer: Annotated[str, typer.Option(help="sgd or adam.")] = "sgd",
    schedule: Annotated[str, typer.Option(help="constant, linear or cosine.")] = "constant",
    warmup: Annotated[int, typer.Option(help="Steps over which the rate rises.")] = 0,
    heads: Annotated[int, typer.Option(help="Heads of each model; more than one is slower.")] = 1,
    dim: Dim = 5,
    noise: Noise = 0.1,
    out: Out = None,
    workers: Workers = 1,
    dask: Dask = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train softmax and linear attention from the same weights on the same prompts; the defaults are the paper's.

    Example: esscher icl train --lengths 10 --steps 20000 --seeds 1
    """
    from esscher.convergence.montecarlo.ladder import parse_ladder
    from esscher.icl.training.spec import TrainSpec

    fields = {"covariances": covariance.split(), "lengths": parse_ladder(lengths).tolist(), "seeds": seeds, "steps": steps}
    fields |= {"batch": batch, "rate": rate, "optimizer": optimizer, "schedule": schedule, "warmup": warmup}
    fields |= {"heads": heads, "dim": dim, "noise": noise, "seed": seed}
    run = _execute(TrainSpec.model_validate(fields), out, workers, dask)
    final = run.table("final")
    lost = final[final["status"] != "ok"]
    if len(lost) == len(final):
        raise ValueError("; ".join(dict.fromkeys(lost["advice"])))
    shown = final[["covariance", "length", "seed", "model", "mse", "stderr", "status", "step"]]
    _show(run, {"final": shown}, as_json, words=("covariance", "model", "status"))
    for row in lost.to_dict("records"):
        log(f"note: {row['covariance']}, L = {row['length']}, seed {row['seed']}: {row['advice']}")


@icl.command()
def flow(
    covariance: Covariance = BOTH,
    lengths: Lengths = "10,30,100,300,1000,1e4,1e5,1e6",
    alpha: Annotated[
        float | None, typer.Option(help="Size of the first weights; by default half of Theorem 5.2's limit.")
    ] = None,
    dim: Dim = 5,
    noise: Noise = 0.1,
    formats: Annotated[
        str, typer.Option("--figures", help="Figure formats: svg, png, pdf, separated by commas; empty for none.")
    ] = "svg,png",
    out: Out = None,
    workers: Workers = 1,
    dask: Dask = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Where gradient flow ends, against the prompt length: mean squared error of both models and of Bayes on L tokens.

    Example: esscher icl flow --lengths 10,1000,1e6
    """
    from esscher.convergence.montecarlo.ladder import parse_ladder
    from esscher.icl.flow.spec import FlowSpec
    from esscher.report.icl_figures import save_flow

    fields = {"covariances": covariance.split(), "lengths": parse_ladder(lengths).tolist(), "alpha": alpha}
    spec = FlowSpec.model_validate(fields | {"dim": dim, "noise": noise, "seed": seed})
    kinds = figure_formats(formats)
    run = _execute(spec, out, workers, dask)
    files = [run.path / f"flow.{kind}" for kind in kinds]
    for file in files:
        save_flow(run.table("final"), noise, file)
    _show(run, {"final": run.table("final")}, as_json, words=("covariance", "model"))
    for file in files:
        log(f"figure: {file}")


@icl.command("risk")
def show_risk(
    run: Annotated[Path | None, path_argument("A run of esscher icl train: its models are evaluated exactly.")] = None,
    covariance: Covariance = BOTH,
    lengths: Lengths = "10,100,1000",
    key_query: Annotated[
        float | None, typer.Option(help="Without a run: U11 is this times I; by default the end of each model's own flow.")
    ] = None,
    value: Annotated[float, typer.Option(help="Without a run: the value v of the block form.")] = 1.0,
    dim: Dim = 5,
    noise: Noise = 0.1,
    as_json: Json = False,
) -> None:
    """Exact mean squared errors: of the models a training run left, beside the flow; or of the block form of Assumption 5.1.

    Example: esscher icl risk --lengths 10,1e6 --key-query 0.5 --value 1.5
    """
    import pandas as pd

    from esscher.convergence.montecarlo.ladder import parse_ladder
    from esscher.icl.flow.end import final_parameters
    from esscher.icl.flow.limit import start_block
    from esscher.icl.layer import KINDS, Block
    from esscher.icl.risk.exact import decompose, risk
    from esscher.icl.tasks import as_task
    from esscher.runs import load_run

    if run is not None:
        tables = _trained(load_run(run))
        shown = {"trained": tables["trained"], "beside the flow": tables["compared"]}
        _show(None, shown, as_json, words=("covariance", "model", "status"))
        return
    if not math.isfinite(value):
        raise ValueError(f"--value: expected a finite number, got {value}")
    rows = []
    for name in covariance.split():
        task = as_task(name, dim, noise)
        for length in parse_ladder(lengths).tolist():
            for kind in KINDS:
                if key_query is None:
                    block = final_parameters(task, start_block(task), length, kind)
                else:
                    block = Block([[key_query if i == j else 0.0 for j in range(dim)] for i in range(dim)], value)
                parts = decompose(task, block, length, kind)
                names = ("noise", "approximation", "bias", "variance")
                row = {"covariance": name, "length": length, "model": kind, "mse": 2 * float(risk(task, block, length, kind))}
                rows.append(row | {part: 2 * getattr(parts, part) for part in names})
    _show(None, {"risk": pd.DataFrame(rows)}, as_json, words=("covariance", "model"))


@icl.command()
def concentration(
    covariance: Covariance = BOTH,
    lengths: Lengths = "10,30,100,300,1000,3000,1e4,3e4,1e5",
    repeats: Annotated[int, typer.Option(help="Groups of prompts, resampled for the intervals.")] = 32,
    prompts: Annotated[int, typer.Option(help="Prompts in a group.")] = 128,
    dim: Dim = 5,
    noise: Noise = 0.1,
    out: Out = None,
    workers: Workers = 1,
    dask: Dask = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """How fast outputs and gradients of softmax attention become those of linear attention, at the first weights.

    Example: esscher icl concentration --lengths 10,100,1000 --covariance isotropic
    """
    from esscher.convergence.montecarlo.ladder import parse_ladder
    from esscher.icl.concentration.spec import ConcentrationSpec

    fields = {"covariances": covariance.split(), "lengths": parse_ladder(lengths).tolist(), "repeats": repeats}
    spec = ConcentrationSpec.model_validate(fields | {"prompts": prompts, "dim": dim, "noise": noise, "seed": seed})
    run = _execute(spec, out, workers, dask)
    rates = run.table("rates")[["covariance", "metric", "against", "exponent", "low", "high", "status"]]
    _show(run, {"rates": rates}, as_json, words=("covariance", "metric", "against", "status"))


@icl.command()
def figures(
    out: Annotated[Path, path_option("--out", "Folder for figures and their runs.")],
    only: Annotated[str | None, typer.Option(help="Some figures: fig2,fig3; all when left out.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Minutes instead of the paper's size.")] = False,
    training: Annotated[Path | None, path_option("--train", "A run of esscher icl train to use.")] = None,
    formats: Annotated[str, typer.Option(help="Figure formats: svg, png, pdf, separated by commas.")] = "svg,png",
    workers: Workers = 1,
    dask: Dask = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Make Figures 1 to 8 of the paper from stored runs, which are started or completed first.

    Example: esscher icl figures --quick --only fig2,fig3 --out figures
    """
    from esscher.icl.figures import choose_figures, specs_for
    from esscher.runs import execute, load_run, terminal

    chosen, kinds = choose_figures(only), figure_formats(formats)
    runs = {} if training is None else {"train": load_run(training)}
    out.mkdir(parents=True, exist_ok=True)
    for name, spec in specs_for(chosen, quick, seed).items():
        if name in runs:
            continue
        log(f"{name}: {out / 'runs' / name}")
        runs[name] = execute(spec, out / "runs" / name, workers=workers, dask=dask, progress=terminal())
    files = [out / f"{figure.name}.{kind}" for figure in chosen for kind in kinds]
    for figure in chosen:
        for kind in kinds:
            draw(figure, runs, out / f"{figure.name}.{kind}")
    if as_json:
        print_json({"figures": [str(file) for file in files], "runs": {name: str(run.path) for name, run in runs.items()}})
    for file in files:
        log(f"figure: {file}")


def draw(figure: IclFigure, runs: dict[str, Run], path: Path) -> None:
    """One figure from the tables of its runs."""
    from esscher.report.icl_figures import save_concentration, save_distances, save_final_risks, save_training

    def table(run: str, name: str) -> Any:
        source = runs[run]
        found = source.table(name) if name in source.tables else source.partial(name)
        return found[found["covariance"] == figure.covariance]

    if figure.shows == "concentration":
        curves, rates, bounds = (table("concentration", name) for name in ("curves", "rates", "bounds"))
        save_concentration(curves, rates, bounds, figure.title, path)
        return
    trained = table("train", "final")
    if trained.empty:
        raise ValueError(f"{figure.name}: {runs['train'].path} holds no training for {figure.covariance}")
    noise = float(runs["train"].spec["noise"])
    if figure.shows == "final":
        save_final_risks(trained[trained["status"] == "ok"], table("flow", "final"), noise, figure.title, path)
    elif figure.shows == "distance":
        save_distances(table("train", "distance"), figure.title, path)
    else:
        save_training(table("train", "curve"), table("flow", "final"), noise, figure.title, path)


def _trained(run: Run) -> dict[str, pd.DataFrame]:
    """Exact errors of trained models, and the flow's beside them."""
    from esscher.icl.comparison import compare_with_flow, flow_ends, trained_risks

    if run.manifest.job != "icl-train":
        raise ValueError(f"{run.path}: expected a run of esscher icl train, got one of job {run.manifest.job}")
    final, path = (run.table(name) if name in run.tables else run.partial(name) for name in ("final", "path"))
    dim, noise = run.spec["dim"], run.spec["noise"]
    trained = trained_risks(final, path, dim, noise)
    ends = flow_ends(trained, dim, noise)
    return {"trained": trained, "compared": compare_with_flow(trained, ends)}


def _execute(spec: RunSpec, out: Path | None, workers: int, dask: str | None) -> Run:
    from esscher.runs import execute, terminal

    path = out if out is not None else Path("runs") / f"{spec.job}-{spec.hash[:8]}"
    return execute(spec, path, workers=workers, dask=dask, progress=terminal())


def _show(run: Run | None, tables: dict[str, pd.DataFrame], as_json: bool, words: tuple[str, ...]) -> None:
    """Tables for people or for machines; columns of words come first."""
    if as_json:
        head = {} if run is None else {"run": str(run.path), "spec": run.spec}
        print_json(head | {name: table.to_dict("records") for name, table in tables.items()})
        return
    for name, table in tables.items():
        order = [column for column in words if column in table.columns]
        order += [column for column in table.columns if column not in order]
        rows = [[_cell(row[column]) for column in order] for row in table.to_dict("records")]
        title = name if run is None else f"{name}: {run.path}"
        print_table(title, order, rows, left=len([column for column in words if column in table.columns]))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    return str(value)
