"""``esscher icl``: softmax against linear attention on linear regression in context."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.options import Execution, Fields, Given
from esscher.cli.output import (
    FIGURES,
    Figures,
    Json,
    Look,
    Out,
    Shown,
    figure_formats,
    log,
    number,
    path_argument,
    path_option,
    print_json,
    say,
    show_table,
)

if TYPE_CHECKING:
    import pandas as pd

    from esscher.icl.specs import IclFigure
    from esscher.runs import Run, RunSpec

SPEC = "esscher.icl.specs:StabilitySpec"
NAMES = ("covariances", "lengths", "starts", "training", "until", "dim", "noise", "seed")
STABILITY = Fields(
    SPEC, NAMES, flags={"covariances": "covariance"}, as_text={"covariances": " "}, defaults=True
)
TRAPS = Fields(
    SPEC,
    ("covariances", "lengths", "dim", "noise"),
    flags={"covariances": "covariance"},
    as_text={"covariances": " "},
    defaults=True,
)


def stability(
    settings: Annotated[Given, STABILITY],
    where: Execution,
    look: Look,
    trained: Annotated[
        Path | None,
        path_option(
            "--train", "A run of esscher icl train: flow from its first weights for its time."
        ),
    ] = None,
    figures: Figures = FIGURES,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Which first weights get stuck: gradient flow of (O, V, K, Q) for both models from the same
    starts, and a test.

    Example: esscher icl stability --starts 10 --lengths 10,100
    """
    from esscher.icl.comparison import spec_beside
    from esscher.icl.specs import StabilitySpec
    from esscher.runs import execute, load_run, terminal

    figure_formats(figures)  # a mistake is told before anything is computed
    source = None if trained is None else load_run(trained)
    if source is not None and source.manifest.job != "icl-train":
        raise ValueError(
            f"{source.path}: expected a run of esscher icl train, got one of job"
            f" {source.manifest.job}"
        )
    spec = (
        StabilitySpec.model_validate(_settings(settings))
        if source is None
        else spec_beside(source.spec)
    )
    path = out if out is not None else Path("runs") / f"{spec.job}-{spec.hash[:8]}"
    run = execute(spec, path, **where, progress=terminal())
    if source is None:
        return end_stability(run, as_json, figures, look)
    _show(run, {"beside training": _beside(run, source)}, as_json, look)


def end_stability(
    run: Run, as_json: bool, figures: str = FIGURES, look: Given | None = None
) -> None:
    """What finished flows leave: two figures and the verdict."""
    from esscher.icl.stability import ALL
    from esscher.report.icl_figures import save_apart, save_arrivals

    flows, training = run.table("flows"), float(run.spec["training"])
    files = []
    for kind in figure_formats(figures):
        files += [run.path / f"{name}.{kind}" for name in ("arrivals", "apart")]
        save_arrivals(flows, training, float(run.spec["until"]), files[-2])
        save_apart(run.table("distance"), flows, training, files[-1])
    verdict = run.table("verdict")
    if not as_json:
        total = verdict[verdict["covariance"] == ALL].to_dict("records")[0]
        more = {
            1: "linear attention is stuck more often",
            -1: "softmax attention is stuck more often",
            0: "no difference",
        }
        sign = (total["only_linear"] > total["only_softmax"]) - (
            total["only_linear"] < total["only_softmax"]
        )
        told = more[sign] if total["p"] < 0.05 else "neither model is shown to be stuck more often"
        say(
            f"over all settings: {told} (sign test over {total['starts']} starts, p ="
            f" {number(total['p'])})"
        )
    _show(run, {"verdict": verdict}, as_json, look)
    for file in files:
        log(f"figure: {file}")


def traps(settings: Annotated[Given, TRAPS], look: Look, as_json: Json = False) -> None:
    """Critical points outside the block form, where flows get stuck: the error there and whether it
    is a minimum or a saddle.

    Example: esscher icl traps --lengths 10,100,1000 --covariance kms:0.5
    """
    import pandas as pd

    from esscher.icl.comparison import flow_end
    from esscher.icl.layer import KINDS
    from esscher.icl.stability import traps
    from esscher.icl.tasks import as_task

    given = _settings(settings)
    rows = []
    for name in given["covariances"]:
        for kind in KINDS:
            for length in given["lengths"]:
                end = flow_end(name, given["dim"], given["noise"], length, kind)
                for trap in traps(as_task(name, given["dim"], given["noise"]), length, kind):
                    rows.append(
                        {
                            "covariance": name,
                            "model": kind,
                            "length": length,
                            "variance": trap.variance,
                            "mse": trap.mse,
                            "above": trap.mse / end - 1,
                            "falling": trap.falling,
                            "steepest": trap.steepest,
                            "kind": "saddle" if trap.falling else "minimum",
                        }
                    )
    columns = [
        "covariance",
        "model",
        "length",
        "variance",
        "mse",
        "above",
        "falling",
        "steepest",
        "kind",
    ]
    _show(None, {"traps": pd.DataFrame(rows, columns=columns)}, as_json, look)


def add_commands(app: typer.Typer) -> None:
    """Put the commands of this file under ``esscher icl``."""
    app.command()(stability)
    app.command()(traps)


def _settings(flags: Given) -> dict[str, Any]:
    """Fields of a spec, with the words and numbers of flags that are text."""
    from esscher.inputs import parse_ladder

    return flags | {
        "covariances": flags["covariances"].split(),
        "lengths": parse_ladder(flags["lengths"], "lengths").tolist(),
    }


def _beside(run: Run, trained: Run) -> pd.DataFrame:
    from esscher.icl.comparison import beside_training, trained_risks

    exact = trained_risks(
        trained.table("final"), trained.table("path"), trained.spec["dim"], trained.spec["noise"]
    )
    return beside_training(
        run.table("flows"), run.table("distance"), exact, trained.table("distance")
    )


WORDS = ("covariance", "model", "kind", "flow_status", "trained_status")
# shown beside the share they belong to
LEAST = ("softmax_low", "softmax_high", "linear_low", "linear_high")
GIVES_WAY = {
    "softmax_lead": 4,
    "linear_lead": 4,
    "softmax_never": 2,
    "linear_never": 2,
    "starts": 1,
    "end": 3,
}


def _show(
    run: Run | None, tables: dict[str, pd.DataFrame], as_json: bool, look: Given | None
) -> None:
    if as_json:
        head = {} if run is None else {"run": str(run.path), "spec": run.spec}
        print_json(head | {name: table.to_dict("records") for name, table in tables.items()})
        return
    for name, table in tables.items():
        declared = {} if run is None or name not in run.tables else run.columns(name)
        shows = []
        for key in [column for column in table.columns if column not in LEAST]:
            rows, values = table.to_dict("records"), tuple(table[key].tolist())
            header = declared[key].header if key in declared else key.replace("_", " ")
            ends = declared[key].ends if key in declared else None
            cells = tuple(_cell(row, key, ends) for row in rows)
            shows.append(
                Shown(header, cells, key in WORDS, GIVES_WAY.get(key, 0), key=key, values=values)
            )
        show_table(name if run is None else f"{name}: {run.path}", shows, look)


def _cell(row: dict[str, Any], key: str, ends: tuple[str, str] | None) -> str:
    value = row[key]
    if not isinstance(value, float):
        return "" if key == "length" and value == 0 else str(value)
    text = number(value)
    return (
        f"{text} [{number(row[ends[0]])}, {number(row[ends[1]])}]"
        if ends and row[ends[0]] == row[ends[0]]
        else text
    )


# ---- ``esscher icl``: softmax against linear attention on linear regression in context.

icl = typer.Typer(
    help=(
        "In-context learning: softmax against linear attention at any prompt length.\n\n"
        "Example: esscher icl flow --lengths 10,1000,1e6"
    ),
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _flags(spec: str, *names: str) -> Fields:
    flags, words = {"covariances": "covariance"}, {"covariances": " ", "epsilon": ","}
    return Fields(f"esscher.icl.{spec}", names, flags=flags, as_text=words, defaults=True)


SGD = ("seeds", "steps", "batch", "rate", "optimizer", "loss", "schedule", "warmup", "heads")
TASK = ("dim", "noise", "task_cov")
TRAIN = _flags("specs:TrainSpec", "covariances", "lengths", *SGD, *TASK, "seed")
IN_TIME = ("query_inside", "trajectory", "until", "points")
FLOW = _flags("specs:FlowSpec", "covariances", "lengths", "alpha", *TASK, *IN_TIME, "seed")
RISK = _flags(
    "specs:RiskFlags", "covariances", "lengths", *TASK, "query_inside", "query_covariance"
)
LENGTH = _flags("specs:LengthFlags", "epsilon", "covariances", *TASK, "alpha", "query_inside")
CONCENTRATION = _flags(
    "specs:ConcentrationSpec",
    "covariances",
    "lengths",
    "repeats",
    "prompts",
    *TASK,
    "seed",
)
WHICH = _flags("specs:FigureFlags", "only", "quick", "seed")


@icl.command()
def train(
    settings: Annotated[Given, TRAIN],
    where: Execution,
    look: Look,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Train softmax and linear attention from the same weights on the same prompts; the defaults
    are the paper's.

    Example: esscher icl train --lengths 10 --steps 20000 --seeds 1
    """
    from esscher.icl.specs import TrainSpec

    end_train(_execute(TrainSpec.model_validate(_settings(settings)), out, where), as_json, look)


def end_train(run: Run, as_json: bool, look: Given | None = None) -> None:
    """What finished training leaves."""
    final = _final(run)
    lost = final[final["status"] != "ok"]
    if (final["status"] == "diverged").all():
        raise ValueError("; ".join(dict.fromkeys(lost["advice"])))
    shown = final[["covariance", "length", "seed", "model", "mse", "stderr", "status", "step"]]
    _show_worded(run, {"final": shown}, as_json, look)
    for row in lost.to_dict("records"):
        log(f"note: {row['covariance']}, L = {row['length']}, seed {row['seed']}: {row['advice']}")


@icl.command()
def flow(
    settings: Annotated[Given, FLOW],
    where: Execution,
    look: Look,
    figures: Figures = FIGURES,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Where gradient flow ends, against the prompt length: mean squared error of both models and of
    Bayes on L tokens.

    With --trajectory also the way there: both flows in time, how far apart they are, and the bound
    of Lemma E.1.

    Example: esscher icl flow --lengths 10,1000,1e6
    """
    from esscher.icl.specs import FlowSpec

    spec = FlowSpec.model_validate(_settings(settings))
    figure_formats(figures)  # a mistake is told before anything is computed
    end_flow(_execute(spec, out, where), as_json, figures, look)


def end_flow(run: Run, as_json: bool, figures: str = FIGURES, look: Given | None = None) -> None:
    """What a finished flow leaves: its figures and its tables."""
    from esscher.report.icl_figures import save_flow, save_in_time

    tables = {"final": run.table("final")}
    files = [run.path / f"flow.{kind}" for kind in figure_formats(figures)]
    for file in files:
        save_flow(tables["final"], float(run.spec["noise"]), file)
    if run.spec.get("trajectory"):
        tables |= {"trajectory": run.table("trajectory"), "apart": run.table("apart")}
        ways = [run.path / f"trajectory.{kind}" for kind in figure_formats(figures)]
        for file in ways:
            save_in_time(tables["trajectory"], tables["apart"], run.columns("apart"), file)
        files += ways
    shown = (
        tables
        if as_json
        else {name: table for name, table in tables.items() if name != "trajectory"}
    )
    _show_worded(run, shown, as_json, look)
    for file in files:
        log(f"figure: {file}")


@icl.command("risk")
def show_risk(
    settings: Annotated[Given, RISK],
    look: Look,
    run: Annotated[
        Path | None, path_argument("A run of esscher icl train: its models are evaluated exactly.")
    ] = None,
    key_query: Annotated[
        float | None,
        typer.Option(
            help="Without a run: U11 is this times I; by default the end of each model's own flow."
        ),
    ] = None,
    value: Annotated[
        float, typer.Option(help="Without a run: the value v of the block form.")
    ] = 1.0,
    as_json: Json = False,
) -> None:
    """Exact mean squared errors: of the models a training run left, beside the flow; or of the
    block form of Assumption 5.1.

    Example: esscher icl risk --lengths 10,1e6 --key-query 0.5 --value 1.5
    """
    from esscher.runs import load_run

    if run is not None:
        tables = _trained(load_run(run))
        shown = {"trained": tables["trained"], "beside the flow": tables["compared"]}
        _show_worded(None, shown, as_json, look)
        return
    if not math.isfinite(value):
        raise ValueError(f"--value: expected a finite number, got {value}")
    _show_worded(None, {"risk": _risks(_settings(settings), key_query, value)}, as_json, look)


def _risks(task_of: Given, key_query: float | None, value: float) -> pd.DataFrame:
    """Exact errors of the block form in parts; at the end of each model's own flow where no U11 is
    given.
    """
    import pandas as pd

    from esscher.icl.exact import decompose
    from esscher.icl.flow import final_parameters, start_block
    from esscher.icl.layer import KINDS, Block
    from esscher.icl.specs import RiskFlags
    from esscher.icl.tasks import as_task

    asked = RiskFlags(**task_of)
    rows, dim, inside = [], asked.dim, asked.query_inside
    for name in asked.covariances:
        trained = as_task(name, dim, asked.noise, asked.task_cov)
        task = as_task(name, dim, asked.noise, asked.task_cov, asked.query_covariance)
        for length in asked.lengths:
            for kind in KINDS:
                if key_query is None:
                    block = final_parameters(trained, start_block(trained), length, kind, inside)
                else:
                    block = Block(
                        [[key_query if i == j else 0.0 for j in range(dim)] for i in range(dim)],
                        value,
                    )
                parts = decompose(task, block, length, kind, None, inside)
                names = ("noise", "approximation", "bias", "variance")
                row = {"covariance": name, "length": length, "model": kind, "mse": 2 * parts.total}
                rows.append(row | {part: 2 * getattr(parts, part) for part in names})
    return pd.DataFrame(rows)


@icl.command()
def length(settings: Annotated[Given, LENGTH], look: Look, as_json: Json = False) -> None:
    """L(epsilon) of Theorem 5.2: the shortest prompts on which gradient flow ends within epsilon of
    the best risk.

    Example: esscher icl length --epsilon .1,.01 --task-cov identity --noise 0
    """
    import pandas as pd

    from esscher.icl.flow import prompt_length_for, start_block
    from esscher.icl.layer import KINDS
    from esscher.icl.specs import LengthFlags
    from esscher.icl.tasks import as_task

    words = {
        "covariances": settings["covariances"].split(),
        "epsilon": settings["epsilon"].split(","),
    }
    asked = LengthFlags(**settings | words)
    rows = []
    for name in asked.covariances:
        task = as_task(name, asked.dim, asked.noise, asked.task_cov)
        start = start_block(task, asked.alpha)
        for epsilon in asked.epsilon:
            for kind in KINDS:
                found = prompt_length_for(
                    task, epsilon, kind, start, query_inside=asked.query_inside
                )
                rows.append(
                    {"covariance": name, "model": kind, "epsilon": epsilon, "length": found}
                )
    _show_worded(None, {"shortest prompts": pd.DataFrame(rows)}, as_json, look)


@icl.command()
def concentration(
    settings: Annotated[Given, CONCENTRATION],
    where: Execution,
    look: Look,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """How fast outputs and gradients of softmax attention become those of linear attention, at the
    first weights.

    Example: esscher icl concentration --lengths 10,100,1000 --covariance isotropic
    """
    from esscher.icl.specs import ConcentrationSpec

    end_concentration(
        _execute(ConcentrationSpec.model_validate(_settings(settings)), out, where),
        as_json,
        look,
    )


def end_concentration(run: Run, as_json: bool, look: Given | None = None) -> None:
    rates = run.table("rates")[
        ["covariance", "metric", "against", "exponent", "low", "high", "status"]
    ]
    lemmas = {"Lemmas E.2 and E.4": run.table("risks")} if "risks" in run.tables else {}
    _show_worded(run, {"rates": rates} | lemmas, as_json, look)


@icl.command()
def figures(
    which: Annotated[Given, WHICH],
    where: Execution,
    out: Annotated[Path, path_option("--out", "Folder for figures and their runs.")],
    training: Annotated[
        Path | None, path_option("--train", "A run of esscher icl train to use.")
    ] = None,
    formats: Annotated[
        str, typer.Option(help="Figure formats: svg, png, pdf, separated by commas.")
    ] = "svg,png",
    as_json: Json = False,
) -> None:
    """Make Figures 1 to 8 of the paper from stored runs, which are started or completed first.

    Example: esscher icl figures --quick --only fig2,fig3 --out figures
    """
    from esscher.icl.specs import FigureFlags, choose_figures, specs_for
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
        draw(figure, runs, [out / f"{figure.name}.{kind}" for kind in kinds])
    if as_json:
        print_json(
            {
                "figures": [str(file) for file in files],
                "runs": {name: str(run.path) for name, run in runs.items()},
            }
        )
    for file in files:
        log(f"figure: {file}")


def draw(figure: IclFigure, runs: dict[str, Run], paths: Sequence[Path]) -> None:
    """One figure from the tables of its runs, into each of some files."""
    from esscher.report.icl_figures import (
        save_concentration,
        save_distances,
        save_final_risks,
        save_training,
    )

    def table(run: str, name: str) -> Any:
        source = runs[run]
        found = source.table(name) if name in source.tables else source.partial(name)
        return found[found["covariance"] == figure.covariance]

    if figure.shows == "concentration":
        curves, rates, bounds = (
            table("concentration", name) for name in ("curves", "rates", "bounds")
        )
        for path in paths:
            save_concentration(curves, rates, bounds, figure.title, path)
        return
    if table("train", "final").empty:
        raise ValueError(
            f"{figure.name}: {runs['train'].path} holds no training for {figure.covariance}"
        )
    if figure.shows == "distance":  # a line for each seed
        _in_the_valley(figure, _final(runs["train"]), left_out="drawn as a line of its own")
        for path in paths:
            save_distances(table("train", "distance"), figure.title, path)
        return
    flow, noise = table("flow", "final"), float(runs["train"].spec["noise"])
    there = _in_the_valley(figure, _final(runs["train"], flow))
    keys = ["covariance", "length", "seed", "model"]
    for path in paths:
        if figure.shows == "final":
            save_final_risks(there, flow, noise, figure.title, path)
        else:
            save_training(
                table("train", "curve").merge(there[keys]), flow, noise, figure.title, path
            )


def _in_the_valley(
    figure: IclFigure, trained: pd.DataFrame, left_out: str = "left out"
) -> pd.DataFrame:
    """The models of a figure that are at the end of their flow or on their way there; the others
    are named, and left out.
    """
    own = trained[trained["covariance"] == figure.covariance]
    for row in own[own["status"] != "ok"].to_dict("records"):
        kept = "drawn, and still on its way" if row["status"] == "undertrained" else left_out
        log(
            f"{figure.name}: L = {row['length']}, seed {row['seed']}: {row['status']}, {kept};"
            f" {row['advice']}"
        )
    return own[own["status"].isin(["ok", "undertrained"])]


def _final(run: Run, flow: pd.DataFrame | None = None) -> pd.DataFrame:
    """What training left, each model with the status that the end of its flow gives it; several
    heads have no such flow.
    """
    from esscher.icl.comparison import flow_ends, judged

    final, curve = (
        run.table(name) if name in run.tables else run.partial(name) for name in ("final", "curve")
    )
    if run.spec["heads"] > 1:
        return final
    task = (run.spec["dim"], run.spec["noise"], run.spec.get("task_cov", "scaled"))
    ends = flow_ends(final, *task) if flow is None else flow
    return judged(final, curve, ends)


def _trained(run: Run) -> dict[str, pd.DataFrame]:
    """Exact errors of trained models, and the flow's beside them."""
    from esscher.icl.comparison import compare_with_flow, flow_ends, trained_risks

    if run.manifest.job != "icl-train":
        raise ValueError(
            f"{run.path}: expected a run of esscher icl train, got one of job {run.manifest.job}"
        )
    final, path = _final(run), run.table("path") if "path" in run.tables else run.partial("path")
    task = (run.spec["dim"], run.spec["noise"], run.spec.get("task_cov", "scaled"))
    trained = trained_risks(final, path, *task)
    ends = flow_ends(trained, *task)
    return {"trained": trained, "compared": compare_with_flow(trained, ends)}


def _execute(spec: RunSpec, out: Path | None, where: Given) -> Run:
    from esscher.runs import execute, terminal

    path = out if out is not None else Path("runs") / f"{spec.job}-{spec.hash[:8]}"
    return execute(spec, path, **where, progress=terminal())


FIRST = ("covariance", "model", "metric", "against", "status")  # these columns come first
# these give way
YIELDING = {
    "noise": 5,
    "approximation": 4,
    "bias": 3,
    "variance": 2,
    "stderr": 1,
    "step": 2,
    "seed": 1,
}


def _show_worded(
    run: Run | None, tables: dict[str, pd.DataFrame], as_json: bool, look: Given | None
) -> None:
    """Tables for people, below what they say in words, or for machines."""
    if as_json:
        head = {} if run is None else {"run": str(run.path), "spec": run.spec}
        print_json(head | {name: table.to_dict("records") for name, table in tables.items()})
        return
    for name, table in tables.items():
        for sentence in _in_words(table):
            say(sentence)
        order = sorted(
            table.columns,
            key=lambda column: FIRST.index(column) if column in FIRST else len(FIRST),
        )
        shows = []
        for column in order:
            cells = tuple(number(x) if isinstance(x, float) else str(x) for x in table[column])
            values = tuple(table[column].tolist())
            shows.append(
                Shown(
                    column,
                    cells,
                    column in FIRST,
                    YIELDING.get(column, 0),
                    key=column,
                    values=values,
                )
            )
        show_table(name if run is None else f"{name}: {run.path}", shows, look)


def _in_words(table: pd.DataFrame) -> Iterator[str]:
    """Errors of the models at the longest prompt, a sentence a covariance."""
    if not {"covariance", "length", "model", "mse"} <= set(table.columns):
        return
    longest = table["length"].max()
    for covariance, rows in table[table["length"] == longest].groupby("covariance", sort=False):
        errors = rows.groupby("model", sort=False)["mse"].mean()
        told = ", ".join(f"{model} {number(value)}" for model, value in errors.items())
        yield f"{covariance}, prompts of {longest:,} tokens: mean squared error {told}"


add_commands(icl)  # last in help
