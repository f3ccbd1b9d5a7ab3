"""``esscher icl``: softmax against linear attention on linear regression in context."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.options import Execution, Fields, Given
from esscher.cli.output import (
    FIGURES,
    Figures,
    Json,
    Out,
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

__all__ = ["end_concentration", "end_flow", "end_train", "icl"]

icl = typer.Typer(
    help="In-context learning: softmax against linear attention at any prompt length.\n\n"
    "Example: esscher icl flow --lengths 10,1000,1e6",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _flags(spec: str, *names: str) -> Fields:
    flags, words = {"covariances": "covariance"}, {"covariances": " "}
    return Fields(f"esscher.icl.{spec}", names, flags=flags, as_text=words, defaults=True)


TASK = ("covariances", "lengths", "dim", "noise")
SGD = ("seeds", "steps", "batch", "rate", "optimizer", "schedule", "warmup", "heads")
TRAIN = _flags("training.spec:TrainSpec", "covariances", "lengths", *SGD, "dim", "noise", "seed")
FLOW = _flags("flow.spec:FlowSpec", "covariances", "lengths", "alpha", "dim", "noise", "seed")
RISK = _flags("training.spec:TrainSpec", *TASK)
CONCENTRATION = _flags(
    "concentration.spec:ConcentrationSpec", "covariances", "lengths", "repeats", "prompts", "dim", "noise", "seed"
)
WHICH = _flags("figures:FigureFlags", "only", "quick", "seed")


@icl.command()
def train(settings: Annotated[Given, TRAIN], where: Execution, out: Out = None, as_json: Json = False) -> None:
    """Train softmax and linear attention from the same weights on the same prompts; the defaults are the paper's.

    Example: esscher icl train --lengths 10 --steps 20000 --seeds 1
    """
    from esscher.icl.training.spec import TrainSpec

    end_train(_execute(TrainSpec.model_validate(_settings(settings)), out, where), as_json)


def end_train(run: Run, as_json: bool) -> None:
    """What finished training leaves."""
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
    settings: Annotated[Given, FLOW],
    where: Execution,
    figures: Figures = FIGURES,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Where gradient flow ends, against the prompt length: mean squared error of both models and of Bayes on L tokens.

    Example: esscher icl flow --lengths 10,1000,1e6
    """
    from esscher.icl.flow.spec import FlowSpec

    spec = FlowSpec.model_validate(_settings(settings))
    figure_formats(figures)  # a mistake is told before anything is computed
    end_flow(_execute(spec, out, where), as_json, figures)


def end_flow(run: Run, as_json: bool, figures: str = FIGURES) -> None:
    """What a finished flow leaves: its figure and its table."""
    from esscher.report.icl_figures import save_flow

    files = [run.path / f"flow.{kind}" for kind in figure_formats(figures)]
    for file in files:
        save_flow(run.table("final"), float(run.spec["noise"]), file)
    _show(run, {"final": run.table("final")}, as_json, words=("covariance", "model"))
    for file in files:
        log(f"figure: {file}")


@icl.command("risk")
def show_risk(
    settings: Annotated[Given, RISK],
    run: Annotated[Path | None, path_argument("A run of esscher icl train: its models are evaluated exactly.")] = None,
    key_query: Annotated[
        float | None, typer.Option(help="Without a run: U11 is this times I; by default the end of each model's own flow.")
    ] = None,
    value: Annotated[float, typer.Option(help="Without a run: the value v of the block form.")] = 1.0,
    as_json: Json = False,
) -> None:
    """Exact mean squared errors: of the models a training run left, beside the flow; or of the block form of Assumption 5.1.

    Example: esscher icl risk --lengths 10,1e6 --key-query 0.5 --value 1.5
    """
    from esscher.runs import load_run

    if run is not None:
        tables = _trained(load_run(run))
        shown = {"trained": tables["trained"], "beside the flow": tables["compared"]}
        _show(None, shown, as_json, words=("covariance", "model", "status"))
        return
    if not math.isfinite(value):
        raise ValueError(f"--value: expected a finite number, got {value}")
    _show(None, {"risk": _risks(_settings(settings), key_query, value)}, as_json, words=("covariance", "model"))


def _risks(task_of: Given, key_query: float | None, value: float) -> pd.DataFrame:
    """Exact errors of the block form in parts; at the end of each model's own flow where no U11 is given."""
    import pandas as pd

    from esscher.icl.flow.end import final_parameters
    from esscher.icl.flow.limit import start_block
    from esscher.icl.layer import KINDS, Block
    from esscher.icl.risk.exact import decompose, risk
    from esscher.icl.tasks import as_task

    rows, dim = [], task_of["dim"]
    for name in task_of["covariances"]:
        task = as_task(name, dim, task_of["noise"])
        for length in task_of["lengths"]:
            for kind in KINDS:
                if key_query is None:
                    block = final_parameters(task, start_block(task), length, kind)
                else:
                    block = Block([[key_query if i == j else 0.0 for j in range(dim)] for i in range(dim)], value)
                parts = decompose(task, block, length, kind)
                names = ("noise", "approximation", "bias", "variance")
                row = {"covariance": name, "length": length, "model": kind, "mse": 2 * float(risk(task, block, length, kind))}
                rows.append(row | {part: 2 * getattr(parts, part) for part in names})
    return pd.DataFrame(rows)


@icl.command()
def concentration(settings: Annotated[Given, CONCENTRATION], where: Execution, out: Out = None, as_json: Json = False) -> None:
    """How fast outputs and gradients of softmax attention become those of linear attention, at the first weights.

    Example: esscher icl concentration --lengths 10,100,1000 --covariance isotropic
    """
    from esscher.icl.concentration.spec import ConcentrationSpec

    end_concentration(_execute(ConcentrationSpec.model_validate(_settings(settings)), out, where), as_json)


def end_concentration(run: Run, as_json: bool) -> None:
    rates = run.table("rates")[["covariance", "metric", "against", "exponent", "low", "high", "status"]]
    _show(run, {"rates": rates}, as_json, words=("covariance", "metric", "against", "status"))


@icl.command()
def figures(
    which: Annotated[Given, WHICH],
    where: Execution,
    out: Annotated[Path, path_option("--out", "Folder for figures and their runs.")],
    training: Annotated[Path | None, path_option("--train", "A run of esscher icl train to use.")] = None,
    formats: Annotated[str, typer.Option(help="Figure formats: svg, png, pdf, separated by commas.")] = "svg,png",
    as_json: Json = False,
) -> None:
    """Make Figures 1 to 8 of the paper from stored runs, which are started or completed first.

    Example: esscher icl figures --quick --only fig2,fig3 --out figures
    """
    from esscher.icl.figures import FigureFlags, choose_figures, specs_for
    from esscher.runs import execute, load_run, terminal

    asked = FigureFlags(**which)
    chosen, kinds = choose_figures(asked.only), figure_formats(formats)
    runs = {} if training is None else {"train": load_run(training)}
    out.mkdir(parents=True, exist_ok=True)
    for name, spec in specs_for(chosen, asked.quick, asked.seed).items():
        if name in runs:
            continue
        log(f"{name}: {out / 'runs' / name}")
        runs[name] = execute(spec, out / "runs" / name, **where, progress=terminal())
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


def _settings(flags: Given) -> dict[str, Any]:
    """Fields of a spec, with the words and numbers of flags that are text."""
    from esscher.convergence.montecarlo.ladder import parse_ladder

    return flags | {"covariances": flags["covariances"].split(), "lengths": parse_ladder(flags["lengths"]).tolist()}


def _execute(spec: RunSpec, out: Path | None, where: Given) -> Run:
    from esscher.runs import execute, terminal

    path = out if out is not None else Path("runs") / f"{spec.job}-{spec.hash[:8]}"
    return execute(spec, path, **where, progress=terminal())


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
