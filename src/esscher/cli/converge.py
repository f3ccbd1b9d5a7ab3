"""``esscher converge``: Monte Carlo on laws, from a preset, a YAML file and flags."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.options import Execution, Fields, Given
from esscher.cli.output import (
    FIGURES,
    LOOK,
    Figures,
    Json,
    Out,
    Shown,
    check_device,
    count,
    figure_formats,
    log,
    number,
    print_json,
    print_table,
    say,
    show_table,
    shown,
)
from esscher.runs.errors import printable

if TYPE_CHECKING:
    import pandas as pd

    from esscher.runs import Run, RunSpec

SPEC = "esscher.errors.montecarlo.spec:ExperimentSpec"
CHANGES = ("n", "repeats", "metrics", "sampling", "query_inside", "dtype")
EXPERIMENT = Fields(SPEC, CHANGES, as_text={"metrics": ","}, left_out=dict.fromkeys(CHANGES, ""))
SWEEP = Fields("esscher.errors.montecarlo.spec:Sweep", ("values",), as_text={"values": ","})
GIVEN = Fields(SPEC, ("seed", "device"), defaults=True)  # before what the preset says


def converge(
    changes: Annotated[Given, EXPERIMENT, SWEEP, GIVEN, LOOK],
    where: Execution,
    preset: Annotated[str | None, typer.Argument(help="Name of a preset, or a YAML file.")] = None,
    out: Out = None,
    figures: Figures = FIGURES,
    listing: Annotated[bool, typer.Option("--list", help="Name the presets and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Measure how fast attention converges on tokens of a law, fit the rates, and set them beside
    theory.

    Example: esscher converge gaussian --repeats 20 --workers 2
    """
    from esscher.runs import execute, terminal

    if listing or preset is None:
        _list_presets(as_json)
        return
    look = {name: changes.pop(name) for name in LOOK.names if name in changes}
    name = Path(preset).stem
    spec = _read(_settings(preset, changes))
    figure_formats(figures)  # a mistake is told before anything is computed
    path = out if out is not None else Path("runs") / f"{name}-{spec.hash[:8]}"
    run = execute(spec, path, **where, progress=terminal())
    if spec.job == "normality":
        end_normality(run, as_json, look)
    else:
        end_converge(run, as_json, figures, look)


def _read(fields: dict[str, Any]) -> RunSpec:
    """The spec of the job that a preset names; there are two kinds of experiment."""
    from esscher.errors.montecarlo.spec import ExperimentSpec

    job = fields.get("job", "converge")
    if job == "normality":
        from esscher.papers.specs import NormalitySpec

        return NormalitySpec.model_validate(fields)
    if job != "converge":
        raise ValueError(f"job: expected converge or normality, got {job!r}")
    return ExperimentSpec.model_validate(fields)


def end_converge(
    run: Run, as_json: bool, figures: str = FIGURES, look: Given | None = None
) -> None:
    """What a finished sweep leaves: figures of its rates, and the table."""
    from esscher.report.figures import save_rates
    from esscher.report.words import theory_lines

    rates, curves = run.table("rates"), run.table("curves") if "curves" in run.tables else None
    files = [run.path / f"rates.{kind}" for kind in figure_formats(figures)]
    over, title = (
        str((run.spec.get("sweep") or {}).get("over", "")),
        printable(run.spec["title"] or run.path.name),
    )
    for file in files:
        save_rates(curves, rates, theory_lines(run.columns("rates")), title, over, file)
    beside = {
        name: run.table(name).to_dict("records")
        for name in ("constants", "growth")
        if name in run.tables
    }
    if as_json:
        print_json(
            {"run": str(run.path), "spec": run.spec, "rates": rates.to_dict("records"), **beside}
        )
    else:
        show_rates(run, over, look)
        for name in beside:
            _show_stored(run, name, SUPPORT[name], look)
        for file in files:
            log(f"figure: {file}")


def end_normality(run: Run, as_json: bool, look: Given | None = None) -> None:
    """What finished draws leave: how often each kind of region held the limit, and how normal the
    error was.
    """
    rows = run.table("coverage").to_dict("records")
    if as_json:
        print_json({"run": str(run.path), "spec": run.spec, "coverage": rows})
        return
    level = float(run.spec["level"])
    for kind in ("bernstein", "markov"):
        known = [row for row in rows if row[kind] == row[kind]]
        least = min((row[kind] for row in known), default=math.nan)
        if known:
            say(
                f"{kind}, proved for {level:.0%}: holds the limit in at least {least:.1%} of the"
                " draws of every row"
            )
    short = sum(row["normal"] + 2 * row["normal_stderr"] < level for row in rows)
    say(
        f"normal, asymptotic {level:.0%}: below that by more than two standard errors in {short} of"
        f" {len(rows)} rows"
    )
    _show_stored(run, "coverage", COVERAGE, look)


def _show_stored(run: Run, table: str, places: Mapping[str, int], look: Given | None) -> None:
    """A stored table with the columns that matter; ``places`` says which give way where there is no
    room.
    """
    rows, columns = run.table(table).to_dict("records"), run.columns(table)
    form = {"n": count}
    found = [
        shown(replace(columns[name], ends=None), rows, form.get(name, ".3g"), gives_way=i)
        for name, i in places.items()
    ]
    show_table(f"{run.path}: {table}", found, look)


def _settings(preset: str, changes: Given) -> dict[str, Any]:
    """Fields of the spec: flags before the preset or the file."""
    import yaml

    from esscher.errors.montecarlo.job import read_preset
    from esscher.runs.spec import read_mapping

    found = (
        read_mapping(Path(preset))
        if preset.endswith((".yaml", ".yml"))
        else yaml.safe_load(read_preset(preset))
    )
    if "metrics" in changes:
        changes["metrics"] = changes["metrics"].split(",")
    if "values" in changes:
        if not isinstance(found.get("sweep"), dict):
            raise ValueError("--values: this experiment sweeps over nothing")
        changes["sweep"] = found["sweep"] | {"values": _numbers(changes.pop("values"))}
    check_device(changes["device"])
    return {**found, **changes}


# The columns of the table of rates, and which give way where there is no room
RATES = {
    **{
        "metric": 0,
        "horizon2": 3,
        "coupling": 6,
        "exponent": 0,
        "low": 1,
        "high": 1,
        "exact_exponent": 2,
        "sharp": 4,
    },
    **{"bohbot_experimental": 7, "bohbot": 5, "preferred_law": 8, "status": 0},
}
SUPPORT = {  # the same for the tables of a sweep over the support
    "constants": {
        "value": 0,
        "metric": 0,
        "rate": 0,
        "exponent": 3,
        "constant": 0,
        "stderr": 1,
        "bound": 2,
        "bound_any": 2,
    },
    "growth": {
        **{
            "metric": 0,
            "rate": 0,
            "of": 0,
            "form": 0,
            "power": 0,
            "power_low": 2,
            "power_high": 2,
            "power_misfit": 4,
        },
        **{
            "growth": 0,
            "growth_low": 2,
            "growth_high": 2,
            "growth_misfit": 4,
        },
    },
}
COVERAGE = {
    **{
        "case": 0,
        "n": 0,
        "effective_tokens": 3,
        "normal": 0,
        "normal_stderr": 2,
        "bernstein": 0,
        "bernstein_stderr": 2,
    },
    **{
        "markov": 0,
        "markov_stderr": 2,
        "normal_size": 5,
        "bernstein_size": 5,
        "markov_size": 5,
        "kolmogorov": 1,
    },
    **{"kolmogorov_noise": 4, "skewness": 4, "kurtosis": 6, "chi2_mean": 6, "chi2_median": 3},
}


def show_rates(run: Run, over: str, look: Given | None = None) -> None:
    """What the rates of a run say, their table, and the reasons of what could not be fitted."""
    rates, columns = run.table("rates"), run.columns("rates")
    rows = rates.to_dict("records")
    values = tuple(row["value"] for row in rows)
    point = Shown(
        over or "-",
        tuple(number(value, "g") if over else "" for value in values),
        words=True,
        values=values,
    )
    for metric, part in rates.groupby("metric", sort=False):
        say(_in_words(str(metric), part))
    # the ends of the interval have columns of their own
    found = [
        shown(replace(columns[name], ends=None), rows, ".3g", gives_way=last)
        for name, last in RATES.items()
    ]
    show_table(str(run.path), [point, *found] if over else found, look)
    for reason in dict.fromkeys(rates.loc[~rates["status"].isin(["ok", "exact"]), "reason"]):
        log(f"note: {reason}")


def _in_words(metric: str, rates: pd.DataFrame) -> str:
    """The exponents of one metric in a sentence."""
    fitted = rates[rates["exponent"].notna()]
    if fitted.empty:
        return f"{metric}: no rate could be fitted"
    low, high = fitted["exponent"].min(), fitted["exponent"].max()
    said = f"{metric}: error ~ n^-b with b = {low:.3g}" + ("" if low == high else f" to {high:.3g}")
    half = int((fitted["low"].le(0.5) & fitted["high"].ge(0.5)).sum())
    said += f"; 1/2 is within the interval of {half} of {len(fitted)} points"
    exact = fitted[fitted["exact_exponent"].notna()]
    if len(exact):
        inside = int(
            (
                exact["low"].le(exact["exact_exponent"]) & exact["high"].ge(exact["exact_exponent"])
            ).sum()
        )
        said += f", the exact exponent within that of {inside} of {len(exact)}"
    return said


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as cause:
        raise ValueError(f"--values: expected numbers separated by commas, got {text!r}") from cause


def _list_presets(as_json: bool) -> None:
    import yaml

    from esscher.errors.montecarlo.job import preset_names, read_preset

    found = {name: yaml.safe_load(read_preset(name)) for name in preset_names()}
    if as_json:
        print_json(found)
        return
    rows = [
        [name, str(spec["title"]), read_preset(name).splitlines()[0].removeprefix("# ")]
        for name, spec in found.items()
    ]
    print_table("presets: esscher converge NAME", ["name", "title", "what it shows"], rows, left=3)
