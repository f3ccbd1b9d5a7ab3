"""``esscher icl stability`` and ``esscher icl traps``: which first weights get stuck, and where."""

from __future__ import annotations

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
    path_option,
    print_json,
)
from esscher.cli.tables import Look, Shown, say, show_table

if TYPE_CHECKING:
    import pandas as pd

    from esscher.runs import Run

__all__ = ["add_commands", "end_stability"]

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
    from esscher.report.stability_figures import save_apart, save_arrivals

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
    from esscher.convergence.montecarlo.ladder import parse_ladder

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
