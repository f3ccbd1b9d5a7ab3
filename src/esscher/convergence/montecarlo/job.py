"""Synthetic experiments as runs: a law, a head, a sweep over one number, Monte Carlo errors, rates
beside predictions.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
import torch

from esscher.attention.head import Head
from esscher.convergence.curve import ErrorCurve
from esscher.convergence.montecarlo.columns import columns
from esscher.convergence.montecarlo.converge import Unit as Repeat
from esscher.convergence.montecarlo.converge import assemble, converge_unit
from esscher.convergence.montecarlo.draw import Plan
from esscher.convergence.montecarlo.growth import constant_rows, growth_table, of_support
from esscher.convergence.montecarlo.head import build_head
from esscher.convergence.montecarlo.metrics import METRICS
from esscher.convergence.montecarlo.metrics.base import Exponents
from esscher.convergence.montecarlo.plan import Design, plan
from esscher.convergence.montecarlo.spec import ExperimentSpec, HeadSpec
from esscher.convergence.rate.fit import fit_rate
from esscher.measures.base import Measure
from esscher.runs import Job, Shard, Unit

__all__ = ["CONVERGE", "preset_names", "read_preset"]

REPEATS_PER_UNIT = 10  # repeats a unit of work does; seeds do not depend on it
# any other word leaves the choice to the plan
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def preset_names() -> list[str]:
    folder = importlib.resources.files("esscher.convergence.montecarlo") / "presets"
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
        importlib.resources.files("esscher.convergence.montecarlo") / "presets" / f"{name}.yaml"
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
