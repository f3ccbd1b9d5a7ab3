"""Synthetic experiments as runs: a law, a head, a sweep over one number, Monte Carlo errors, rates
beside predictions.
"""

from __future__ import annotations

import functools
import importlib.resources
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from esscher.attention.head import Head
from esscher.errors.curve import CURVE, HORIZONS, RATE, STATUS, ErrorCurve
from esscher.errors.montecarlo.converge import (
    Design,
    assemble,
    build_head,
    converge_unit,
    mean_error,
    plan,
)
from esscher.errors.montecarlo.converge import Unit as Repeat
from esscher.errors.montecarlo.draw import Plan
from esscher.errors.montecarlo.metrics import METRICS, Exponents
from esscher.errors.montecarlo.spec import ExperimentSpec, HeadSpec
from esscher.errors.rate import fit_rate
from esscher.intervals import t_quantile
from esscher.measures.base import Measure
from esscher.measures.fields import LawFields
from esscher.runs import Job, Shard, Unit
from esscher.runs.columns import Column, Declared
from esscher.theory import bohbot
from esscher.theory.sharp import uniform_constant

POINT = (
    Column("point", "int", "point", "Place in the sweep."),
    Column("value", "float", "value", "Value of what the sweep varies."),
)
ERRORS = (
    Column("repeat", "int", "repeat", "Number of the draw."),
    Column("squared", "float", "squared error", "Squared error of one draw."),
    Column("limit_squared", "float", "squared limit", "Squared size of the limit."),
)
QUERY_STDERR = Column(
    "query_stderr",
    "float",
    "standard error, queries",
    "The part of the standard error that comes of the choice of queries.",
)
THEORY = (
    Column(
        "exact_exponent",
        "float",
        "exact exponent",
        "Exponent of the exact error over the same n.",
        short="exact",
        of="horizon2",
        status="exact",
    ),
    Column(
        "sharp",
        "float",
        "sharp exponent",
        "Heuristic exponent of random-energy type.",
        short="sharp (heuristic)",
        of="horizon2",
        status="heuristic",
        formula="sharp",
    ),
    Column(
        "bohbot_experimental",
        "float",
        "experimental exponent",
        "Exponent from an experiment that a summary of the paper suggests; not proved.",
        short=bohbot.EXPERIMENTAL,
        of="coupling",
        status="experimental",
        formula=bohbot.EXPERIMENTAL,
    ),
    Column(
        "bohbot",
        "float",
        "proved exponent",
        "Exponent proved for the moments.",
        short=bohbot.PROVED,
        of="coupling",
        status="proved",
        formula=bohbot.PROVED,
    ),
)
CONSTANTS = (
    Column(
        "rate",
        "word",
        "rate",
        "Which rate a constant belongs to: 1/2, or the one proved for the moments.",
    ),
    Column(
        "constant",
        "float",
        "constant",
        "Largest n^exponent times the mean error, over the ladder of n.",
    ),
    Column("at", "int", "at n", "Token number where that is largest."),
    Column(
        "bound",
        "float",
        "proved constant",
        "Constant of the uniform error proved for this law, by chaining.",
        short="proved: law",
        status="proved",
    ),
    Column(
        "bound_any",
        "float",
        "proved constant, any law",
        "Constant of the uniform error proved for every law of this support, by chaining.",
        short="proved: any law",
        status="proved",
    ),
)
FORMS = {
    "power": ("power of R", "C grows like R to this"),
    "growth": ("growth", "C grows like exp of this times R"),
}
GROWTH = (
    Column(
        "of",
        "word",
        "constant of",
        "measured, or which proved constant: bound or bound_any.",
        short="of",
    ),
    Column(
        "form",
        "word",
        "form",
        "Which form leaves less of the constants unexplained: power or exponential.",
    ),
    *(Column(form, "float", label, f"{words}.") for form, (label, words) in FORMS.items()),
    *(
        Column(
            f"{form}_{end}",
            "float",
            f"{label}, {end}",
            f"{word} end of the interval: {words}.",
            short=end,
        )
        for form, (label, words) in FORMS.items()
        for end, word in (("low", "Lower"), ("high", "Upper"))
    ),
    *(
        Column(
            f"{form}_misfit",
            "float",
            f"{label}, misfit",
            f"Root mean square left of log C, where {words}.",
            short="misfit",
        )
        for form, (label, words) in FORMS.items()
    ),
    Column(
        "power_first",
        "float",
        "power, small R",
        "Power of R over the first half of the radii.",
        short="small R",
    ),
    Column(
        "power_last",
        "float",
        "power, large R",
        "Power of R over the last half of the radii.",
        short="large R",
    ),
)


def columns(spec: Any) -> Declared:
    return {
        "errors": (*POINT, *CURVE, *ERRORS),
        "curves": (*POINT, *CURVE, QUERY_STDERR),
        "rates": (*POINT, *CURVE, *HORIZONS, *RATE, *THEORY, *STATUS),
        "refusals": (*POINT, *STATUS),
        "constants": (*POINT, *CURVE, *RATE[:1], *CONSTANTS),
        "growth": (*CURVE, *CONSTANTS, *GROWTH),
    }


# ---- How the constant of a rate grows with the radius of the tokens' support: like a power of
# it, or exponentially [B].

Floats = npt.NDArray[np.float64]
LEVEL = 0.95
FEWEST = 4  # radii, for a line and something left over


def of_support(law: LawFields, radius: float) -> LawFields:
    """The same law, of a ball, a sphere or a cube, with tokens that reach so far from their
    mean.
    """
    size = radius / math.sqrt(getattr(law, "dim", 1)) if law.size == "half_width" else radius
    return law.model_validate(law.model_dump() | {law.size: size})


def constant_rows(made: Plan, curves: Mapping[str, ErrorCurve]) -> Iterator[dict[str, Any]]:
    """For each metric the constants of n^-1/2 and, where [B] proves a smaller exponent, of that
    one.

    The uniform error has beside it our proved constants: of this law, and of every law of this
    support.
    """
    for name, curve in curves.items():
        if curve.n.size == 0:
            continue
        mean, stderr = mean_error(curve)
        proved = METRICS[name].exponents(made.head, made.measure).bohbot
        for rate, exponent in (("1/2", 0.5), ("proved", proved)):
            if not math.isfinite(exponent):
                continue
            grown = curve.n**exponent * mean
            at = int(grown.argmax())
            row = {
                "metric": name,
                "rate": rate,
                "exponent": exponent,
                "constant": float(grown[at]),
                "at": int(curve.n[at]),
            }
            row |= {
                "stderr": float(curve.n[at] ** exponent * stderr[at]),
                "bound": math.nan,
                "bound_any": math.nan,
            }
            if name == "uniform" and not made.query_inside:
                row["bound"] = uniform_constant(made.head, made.measure, made.radius)
                row["bound_any"] = uniform_constant(
                    made.head, made.measure, made.radius, any_law=True
                )
            yield row


def support_constants(
    head: Head,
    laws: Iterable[Measure],
    n: Any,
    repeats: int,
    metrics: Any = ("mean", "cov", "uniform"),
    seed: int = 0,
) -> pd.DataFrame:
    """The table ``constants`` of a sweep over bounded laws, in this process; ``growth_table`` takes
    it.

    Queries |x| <= R, R the radius of the law's support. Numbers are those of a run whose points
    have these laws.
    """
    rows: list[dict[str, Any]] = []
    for point, law in enumerate(laws):
        reach = law.support_radius()
        if reach is None:
            raise ValueError(f"laws: expected laws of bounded support, got {type(law).__name__}")
        made = plan(
            head, law, n, metrics, seed, Design(radius=reach, experiment=f"converge/{point}")
        )
        curves = assemble(made, [converge_unit(made, repeat) for repeat in range(repeats)])
        rows += [{"point": point, "value": reach} | row for row in constant_rows(made, curves)]
    return pd.DataFrame(rows)


def growth_table(constants: pd.DataFrame) -> pd.DataFrame:
    """Both forms for each metric and rate, and for the proved constants of the uniform error; nan
    with fewer than 4 radii.

    ``misfit``: root mean square of what is left of log C. ``power_first``, ``power_last``: p over
    the first and the last half of the radii; a power has one p, an exponential a p that grows with
    R.
    """
    rows = []
    for (metric, rate), part in constants.groupby(["metric", "rate"], sort=False):
        rows.append(
            {"metric": metric, "rate": rate, "of": "measured"}
            | _forms(part, "constant", part["stderr"])
        )
        for column in ("bound", "bound_any"):
            if part[column].notna().all():
                rows.append(
                    {"metric": metric, "rate": rate, "of": column}
                    | _forms(part, column, 0.0 * part["stderr"])
                )
    return pd.DataFrame(rows)


def _forms(part: pd.DataFrame, column: str, stderr: pd.Series) -> dict[str, Any]:
    ordered = part.assign(error=stderr).sort_values("value")
    R, C = ordered["value"].to_numpy(), ordered[column].to_numpy()
    error = ordered["error"].to_numpy() / C
    half = len(R) // 2
    found: dict[str, Any] = {}
    for form, x in (("power", np.log(R)), ("growth", R)):
        slope, low, high, misfit = _line(x, np.log(C), error)
        found |= {form: slope, f"{form}_low": low, f"{form}_high": high, f"{form}_misfit": misfit}
    ends = [
        _line(np.log(R[at]), np.log(C[at]), error[at], 2)[0]
        for at in (slice(None, half + 1), slice(half, None))
    ]
    found |= {"power_first": ends[0], "power_last": ends[1]}
    told = math.isfinite(found["power_misfit"])
    found["form"] = (
        ""
        if not told
        else "power"
        if found["power_misfit"] <= found["growth_misfit"]
        else "exponential"
    )
    return found


def _line(
    x: Floats, y: Floats, error: Floats, fewest: int = FEWEST
) -> tuple[float, float, float, float]:
    """Slope, the ends of its 95 % interval and the root mean square residual of a line through
    points of equal weight.

    The interval has the larger of two standard errors: that of the points' own errors, and that of
    their scatter.
    """
    if len(x) < fewest:
        return math.nan, math.nan, math.nan, math.nan
    away = x - x.mean()
    leverage = away / (away @ away)
    slope = float(leverage @ y)
    left = y - y.mean() - slope * away
    scatter = math.sqrt(float(left @ left) / max(1, len(x) - 2)) * float(np.linalg.norm(leverage))
    stderr = max(float(np.linalg.norm(leverage * error)), scatter)
    wide = stderr * t_quantile(max(1, len(x) - 2), LEVEL)
    return slope, slope - wide, slope + wide, math.sqrt(float(left @ left) / len(x))


# ---- Synthetic experiments as runs: a law, a head, a sweep over one number, Monte Carlo errors,
# rates beside predictions.

REPEATS_PER_UNIT = 10  # repeats a unit of work does; seeds do not depend on it
# any other word leaves the choice to the plan
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def preset_names() -> list[str]:
    folder = importlib.resources.files("esscher.errors.montecarlo") / "presets"
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )


def read_preset(name: str) -> str:
    """The text of a preset."""
    if name not in preset_names():
        raise ValueError(
            f"preset: expected one of {', '.join(preset_names())} or a YAML file, got {name!r}"
        )
    return (
        importlib.resources.files("esscher.errors.montecarlo") / "presets" / f"{name}.yaml"
    ).read_text("utf-8")


# ---- the job
# ------------------------------------------------------------------------------------------


def units(spec: ExperimentSpec) -> Iterator[Unit]:
    """Some repeats of one point each; and the exact curve of a point, for each metric that may have
    one.
    """
    for point in range(len(spec.points)):
        for first in range(0, spec.repeats, REPEATS_PER_UNIT):
            yield {
                "point": point,
                "first": first,
                "count": min(REPEATS_PER_UNIT, spec.repeats - first),
            }
    exact = (
        []
        if spec.query_inside
        else [name for name in dict.fromkeys(spec.metrics) if METRICS[name].has_exact]
    )
    yield from (
        {"point": point, "exact": metric} for point in range(len(spec.points)) for metric in exact
    )


@functools.lru_cache(maxsize=4)
def setting(spec: ExperimentSpec, point: int) -> tuple[Measure, Head]:
    """Law and head of one point of the sweep."""
    law, head, value = spec.law, spec.head, spec.points[point]
    if spec.sweep is not None and spec.sweep.over == "decay":
        law = law.model_validate(law.model_dump() | {"decay": value})
    elif spec.sweep is not None and spec.sweep.over in ("horizon", "scale"):
        head = HeadSpec.model_validate(
            head.model_dump() | {"horizon": None, "scale": None, spec.sweep.over: value}
        )
    elif spec.sweep is not None and spec.sweep.over == "support":
        law = of_support(law, value)
    measure = law.build(DTYPES.get(spec.dtype, torch.float64), spec.device)
    return measure, build_head(head, measure)


@functools.lru_cache(maxsize=4)
def plan_of(spec: ExperimentSpec, point: int) -> Plan:
    """The checked experiment of one point; ValueError where its law has no limit."""
    measure, head = setting(spec, point)
    swept = spec.sweep is not None and spec.sweep.over in ("radius", "support")
    radius = spec.points[point] if swept and spec.radius is None else spec.radius
    design = Design(
        sampling=spec.sampling,
        query_inside=spec.query_inside,
        queries=spec.queries,
        radius=radius,
        experiment=f"converge/{point}",
        dtype=DTYPES.get(spec.dtype),
        device=spec.device,
    )
    return plan(head, measure, list(spec.n), tuple(dict.fromkeys(spec.metrics)), spec.seed, design)


def compute(spec: ExperimentSpec, unit: Unit) -> dict[str, Any]:
    """Squared errors of the unit's repeats or an exact curve, or why there are none."""
    point = unit["point"]
    try:
        made = plan_of(spec, point)
    except ValueError as reason:
        return {"refusals": [{"point": point, "reason": str(reason)}]}
    if "exact" in unit:
        return exact_tables(spec, point, unit["exact"])
    rows = []
    for repeat in range(unit["first"], unit["first"] + unit["count"]):
        found = converge_unit(made, repeat)
        for metric in spec.metrics:
            squared = found.squared[metric]
            rows += [
                {
                    "point": point,
                    "metric": metric,
                    "repeat": repeat,
                    "n": n,
                    "squared": float(squared[i]),
                    "limit_squared": found.limit_squared[metric],
                }
                for i, n in enumerate(spec.n)
            ]
    return {"errors": rows}


def consolidate(spec: ExperimentSpec, shards: Sequence[Shard]) -> dict[str, Any]:
    """errors (every repeat), curves (tidy, with the exact one beside l2), rates (a row per point
    and metric).
    """
    parts = [shard.tables["errors"].to_pandas() for shard in shards if "errors" in shard.tables]
    errors = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    refusals = {
        int(row["point"]): str(row["reason"])
        for shard in shards
        if "refusals" in shard.tables
        for row in shard.tables["refusals"].to_pylist()
    }
    exact = pd.concat(
        [shard.tables["exact"].to_pandas() for shard in shards if "exact" in shard.tables]
        or [pd.DataFrame({"point": []})]
    )
    curve_rows, rate_rows, constants = [], [], []
    for point, value in enumerate(spec.points):
        identity = {"point": point, "value": value}
        if point in refusals:
            rate_rows += [
                identity | refused(spec, metric, refusals[point]) for metric in spec.metrics
            ]
            continue
        curves = curves_of(spec, point, errors[errors["point"] == point])
        if spec.sweep is not None and spec.sweep.over == "support":
            constants += [identity | row for row in constant_rows(plan_of(spec, point), curves)]
        known = exact[exact["point"] == point]
        for curve in curves.values():
            curve_rows.append(curve.to_frame().assign(query_stderr=curve.query_stderr, **identity))
        exponents = {}
        for metric in spec.metrics:
            own = known[known["metric"] == metric] if len(known) else known
            if len(own):
                exponents[metric] = float(own["exponent"].iloc[0])
                curve_rows.append(own.drop(columns=["exponent", "point"]).assign(**identity))
        for metric, curve in curves.items():
            rate_rows.append(
                identity | rate_row(spec, point, metric, curve, exponents.get(metric, np.nan))
            )
    tables: dict[str, Any] = {"rates": pd.DataFrame(rate_rows)}
    if curve_rows:
        tables |= {"errors": errors, "curves": pd.concat(curve_rows, ignore_index=True)}
    if constants:
        table = pd.DataFrame(constants)
        tables |= {"constants": table, "growth": growth_table(table)}
    return tables


def curves_of(spec: ExperimentSpec, point: int, errors: pd.DataFrame) -> dict[str, ErrorCurve]:
    """The curves of one point from its stored squared errors."""
    repeats = []
    for repeat, rows in errors.groupby("repeat", sort=True):
        by_metric = {metric: part.sort_values("n") for metric, part in rows.groupby("metric")}
        repeats.append(
            Repeat(
                repeat=int(repeat),
                squared={metric: part["squared"].to_numpy() for metric, part in by_metric.items()},
                limit_squared={
                    metric: float(part["limit_squared"].iloc[0])
                    for metric, part in by_metric.items()
                },
            )
        )
    return assemble(plan_of(spec, point), repeats)


def exact_tables(spec: ExperimentSpec, point: int, metric: str) -> dict[str, Any]:
    """The curve of a metric without sampling, with its exponent; no rows of it where the metric has
    none here.
    """
    measure, head = setting(spec, point)
    curve = METRICS[metric].exact(head, measure, list(spec.n), spec.seed)
    if curve is None:
        return {"without": [{"point": point, "metric": metric}]}
    exponent = fit_rate(curve, raise_on_failure=False).exponent
    return {
        "exact": (
            curve.to_frame().assign(query_stderr=curve.query_stderr, point=point, exponent=exponent)
        )
    }


def rate_row(
    spec: ExperimentSpec, point: int, metric: str, curve: ErrorCurve, exact_exponent: float
) -> dict[str, Any]:
    """Fitted exponent with its interval, beside what theory says for this head and law."""
    measure, head = setting(spec, point)
    fit = fit_rate(curve, raise_on_failure=False)
    preferred = "" if fit.power_vs_log is None else fit.power_vs_log.preferred
    return {
        "metric": metric,
        "horizon": head.horizon(measure, sided=1),
        "horizon2": head.horizon(measure),
        "coupling": head.coupling(measure),
        "exponent": fit.exponent,
        "low": fit.interval[0],
        "high": fit.interval[1],
        **asdict(METRICS[metric].exponents(head, measure)),
        "exact_exponent": exact_exponent,
        "preferred_law": preferred,
        "status": fit.status.code,
        "reason": fit.status.text,
    }


def refused(spec: ExperimentSpec, metric: str, reason: str) -> dict[str, Any]:
    numbers = ["horizon", "horizon2", "coupling", "exponent", "low", "high"]
    return {
        "metric": metric,
        **dict.fromkeys(numbers, float("nan")),
        **asdict(Exponents()),
        "exact_exponent": float("nan"),
        "preferred_law": "",
        "status": "refused",
        "reason": reason,
    }


CONVERGE = Job("converge", ExperimentSpec, units, compute, consolidate, columns=columns)
