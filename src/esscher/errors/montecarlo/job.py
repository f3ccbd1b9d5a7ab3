"""The job of ``esscher converge``: a law, a head, a sweep over one number; Monte Carlo errors, and
rates beside theory.
"""

from __future__ import annotations

import functools
import importlib.resources
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import torch

from esscher.errors.curve import CURVE, HORIZONS, RATE, STATUS, ErrorCurve
from esscher.errors.montecarlo.converge import METRICS, Errors, Metric, Plan
from esscher.errors.montecarlo.spec import ExperimentSpec
from esscher.errors.rate import fit_rate
from esscher.runs import Job, Shard, Unit
from esscher.runs.columns import Column, Declared
from esscher.theory import bohbot

REPEATS_PER_UNIT = 10  # repeats a unit of work does; seeds do not depend on it
# any other word leaves the choice to the plan
DTYPES = {"float32": torch.float32, "float64": torch.float64}

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


def columns(spec: Any) -> Declared:
    return {
        "errors": (*POINT, *CURVE, *ERRORS),
        "curves": (*POINT, *CURVE, QUERY_STDERR),
        "rates": (*POINT, *CURVE, *HORIZONS, *RATE, *THEORY, *STATUS),
        "refusals": (*POINT, *STATUS),
    }


PRESETS = importlib.resources.files("esscher.errors.montecarlo") / "presets"


def preset_names() -> list[str]:
    names = (entry.name for entry in PRESETS.iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def read_preset(name: str) -> str:
    """The text of a preset."""
    if name not in preset_names():
        raise ValueError(
            f"preset: expected one of {', '.join(preset_names())} or a YAML file, got {name!r}"
        )
    return (PRESETS / f"{name}.yaml").read_text("utf-8")


# ---- the job


def units(spec: ExperimentSpec) -> Iterator[Unit]:
    """Some repeats of one point each; and the exact curve of a point, for each metric that may have
    one.
    """
    points = range(len(spec.points))
    for point in points:
        for first in range(0, spec.repeats, REPEATS_PER_UNIT):
            count = min(REPEATS_PER_UNIT, spec.repeats - first)
            yield {"point": point, "first": first, "count": count}
    if spec.query_inside:
        return
    exact = [name for name in spec.metrics if type(METRICS[name]).exact is not Metric.exact]
    yield from ({"point": point, "exact": metric} for point in points for metric in exact)


@functools.lru_cache(maxsize=4)
def plan_of(spec: ExperimentSpec, point: int) -> Plan:
    """The checked experiment of one point of the sweep; ValueError where its law has no limit."""
    law, head, radius, value = spec.law, spec.head, spec.radius, spec.points[point]
    over = "" if spec.sweep is None else spec.sweep.over
    if over == "decay":
        law = law.model_validate(law.model_dump() | {"decay": value})
    elif over == "radius":
        radius = value if radius is None else radius
    elif over:
        changed = {"horizon": None, "scale": None, over: value}
        head = head.model_validate(head.model_dump() | changed)
    measure = law.build(DTYPES.get(spec.dtype, torch.float64), spec.device)
    return Plan(
        head.build(measure),
        measure,
        list(spec.n),
        spec.metrics,
        spec.seed,
        sampling=spec.sampling,
        query_inside=spec.query_inside,
        queries=spec.queries,
        radius=radius,
        experiment=f"converge/{point}",
        dtype=DTYPES.get(spec.dtype),
        device=spec.device,
    )


def compute(spec: ExperimentSpec, unit: Unit) -> dict[str, Any]:
    """Squared errors of the unit's repeats or an exact curve, or why there are none."""
    point = unit["point"]
    try:
        made = plan_of(spec, point)
    except ValueError as reason:
        return {"refusals": [{"point": point, "reason": str(reason)}]}
    if "exact" in unit:  # the curve of a metric without sampling, with its exponent
        curve = METRICS[unit["exact"]].exact(made.head, made.measure, list(spec.n), spec.seed)
        if curve is None:
            return {"without": [{"point": point, "metric": unit["exact"]}]}
        exponent = fit_rate(curve, raise_on_failure=False).exponent
        rows = curve.to_frame().assign(query_stderr=curve.query_stderr)
        return {"exact": rows.assign(point=point, exponent=exponent)}
    parts = []
    for repeat in range(unit["first"], unit["first"] + unit["count"]):
        found = made.repeat(repeat)
        for metric in spec.metrics:
            squared, size = found[metric]
            same = {"point": point, "metric": metric, "repeat": repeat, "limit_squared": size}
            parts.append(pd.DataFrame({"n": spec.n, "squared": squared}).assign(**same))
    names = ["point", "metric", "repeat", "n", "squared", "limit_squared"]
    return {"errors": pd.concat(parts, ignore_index=True)[names]}


def consolidate(spec: ExperimentSpec, shards: Sequence[Shard]) -> dict[str, Any]:
    """errors (every repeat), curves (tidy, with the exact ones), rates (a row per point and
    metric).
    """
    errors, exact, refusals = (_joined(shards, name) for name in ("errors", "exact", "refusals"))
    refused = (
        {} if refusals.empty else dict(zip(refusals["point"], refusals["reason"], strict=True))
    )
    curve_rows, rate_rows = [], []
    for point, value in enumerate(spec.points):
        identity = {"point": point, "value": value}
        if point in refused:
            rows = ({"metric": metric, "reason": refused[point]} for metric in spec.metrics)
            rate_rows += [identity | REFUSED | row for row in rows]
            continue
        curves = curves_of(spec, point, errors[errors["point"] == point])
        for curve in curves.values():
            curve_rows.append(curve.to_frame().assign(query_stderr=curve.query_stderr, **identity))
        known = exact[exact["point"] == point] if len(exact) else exact
        exponents: dict[str, float] = {}
        for metric, own in known.groupby("metric", sort=False) if len(known) else ():
            exponents[metric] = float(own["exponent"].iloc[0])
            curve_rows.append(own.drop(columns=["exponent", "point"]).assign(**identity))
        for metric, curve in curves.items():
            row = _rate_row(spec, point, metric, curve)
            rate_rows.append(
                identity | REFUSED | row | {"exact_exponent": exponents.get(metric, math.nan)}
            )
    tables: dict[str, Any] = {"rates": pd.DataFrame(rate_rows)}
    if curve_rows:
        tables |= {"errors": errors, "curves": pd.concat(curve_rows, ignore_index=True)}
    return tables


def _joined(shards: Sequence[Shard], name: str) -> pd.DataFrame:
    parts = [shard.tables[name].to_pandas() for shard in shards if name in shard.tables]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def curves_of(spec: ExperimentSpec, point: int, errors: pd.DataFrame) -> dict[str, ErrorCurve]:
    """The curves of one point from its stored squared errors."""
    repeats: dict[int, dict[str, Errors]] = defaultdict(dict)
    for (number, metric), part in errors.sort_values("n").groupby(["repeat", "metric"]):
        size = float(part["limit_squared"].iloc[0])
        repeats[number][metric] = part["squared"].to_numpy(), size
    return plan_of(spec, point).curves(repeats)


NUMBERS = (
    *("horizon", "horizon2", "coupling", "exponent", "low", "high"),
    *("bohbot", "bohbot_experimental", "sharp", "exact_exponent"),
)
# a row of ``rates`` before anything is known
REFUSED = {
    "metric": "",
    **dict.fromkeys(NUMBERS, math.nan),
    "status": "refused",
    "reason": "",
}


def _rate_row(spec: ExperimentSpec, point: int, metric: str, curve: ErrorCurve) -> dict[str, Any]:
    """Fitted exponent with its interval, beside what theory says for this head and law."""
    head, measure = plan_of(spec, point).head, plan_of(spec, point).measure
    fit = fit_rate(curve, raise_on_failure=False)
    return {
        "metric": metric,
        "horizon": head.horizon(measure, sided=1),
        "horizon2": head.horizon(measure),
        "coupling": head.coupling(measure),
        "exponent": fit.exponent,
        "low": fit.interval[0],
        "high": fit.interval[1],
        **METRICS[metric].exponents(head, measure),
        "status": fit.status.code,
        "reason": fit.status.text,
    }


CONVERGE = Job("converge", ExperimentSpec, units, compute, consolidate, columns=columns)
