"""The runs of the lab: training, flow, stability and concentration, in units of work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pandas as pd
import torch

from esscher.errors.curve import ErrorCurve
from esscher.errors.rate import fit_rate
from esscher.icl import columns
from esscher.icl.comparison import flow_end
from esscher.icl.concentration import (
    AGAINST,
    METRICS,
    bounds,
    prompt_errors,
    risk_gaps,
    risk_gradient_errors,
)
from esscher.icl.exact import bayes_risk, risk
from esscher.icl.flow import final_parameters, flow_bound, flow_times, gradient_flow, start_block
from esscher.icl.layer import KINDS, OVKQ, Block, default_weights
from esscher.icl.specs import ConcentrationSpec, FlowSpec, StabilitySpec, TrainSpec
from esscher.icl.stability import apart, balance, pair_flows, start_lead, summary, verdict
from esscher.icl.tasks import LinearTask, as_task
from esscher.icl.training import Settings, train
from esscher.runs import Job, Shard, Unit
from esscher.runs.columns import Declared
from esscher.runs.progress import advance

FIRST = 1e-4  # of the time of training: the first time of a stability run recorded after 0

Spec = TrainSpec | FlowSpec | ConcentrationSpec


def _task(spec: Spec, covariance: str) -> LinearTask:
    return as_task(covariance, spec.dim, spec.noise, spec.task_cov)


def _units(spec: Spec, name: str = "length") -> list[Unit]:
    """Every covariance and length, short prompts first: they take the least time."""
    for covariance in spec.covariances:
        _task(spec, covariance)  # a mistake is told before anything is computed
    return [
        {"covariance": covariance, name: length}
        for length in sorted(spec.lengths)
        for covariance in spec.covariances
    ]


def _joined(shards: Sequence[Shard], name: str) -> pd.DataFrame:
    """One table of all units."""
    return pd.concat([shard.tables[name].to_pandas() for shard in shards], ignore_index=True)


def _train_units(spec: TrainSpec) -> list[Unit]:
    _units(spec)
    return [
        {"covariance": covariance, "length": length, "seed": seed}
        for length in spec.lengths
        for seed in range(spec.seeds)
        for covariance in spec.covariances
    ]


def _train_unit(spec: TrainSpec, unit: Unit) -> dict[str, Any]:
    """Train one pair; the seed alone decides the first weights, so all lengths and covariances
    share them.
    """
    shared = {field.name for field in fields(Settings)} & set(TrainSpec.model_fields) - {"seed"}
    seeds = {"seed": spec.seed + unit["seed"], "prompt_seed": spec.unit_seed(unit)}
    training = train(
        _task(spec, unit["covariance"]),
        unit["length"],
        Settings(**spec.model_dump(include=shared), **seeds),
        raise_on_divergence=False,
        progress=lambda done, of: advance(done / of),
    )
    return {name: getattr(training, name).assign(**unit) for name in columns.TRAIN}


def _train_tables(spec: TrainSpec, shards: Sequence[Shard]) -> dict[str, Any]:
    return {name: _joined(shards, name) for name in columns.TRAIN}


def _flow_unit(spec: FlowSpec, unit: Unit) -> dict[str, Any]:
    """Mean squared error (twice the risk) at the end of the flow of each model, and of the best
    predictor on L tokens.
    """
    task, length, inside = _task(spec, unit["covariance"]), unit["length"], spec.query_inside
    start, rows = start_block(task, spec.alpha), []
    for kind in KINDS:
        end = final_parameters(task, start, length, kind, inside)
        found = risk(task, end, length, kind, query_inside=inside)
        error = 2 * found.error if inside else 0.0
        rows.append({"model": kind, "mse": 2 * found.value, "stderr": error})
    generator = torch.Generator().manual_seed(spec.unit_seed(unit))
    bayes = bayes_risk(task, length, spec.draws, generator)
    rows.append({"model": "bayes", "mse": 2 * bayes.value, "stderr": 2 * bayes.error})
    tables: dict[str, Any] = {"final": rows}
    if spec.trajectory:
        tables |= _in_time(task, start, length, flow_times(spec.until, spec.points), inside)
    return {name: [unit | row for row in table] for name, table in tables.items()}


def _in_time(
    task: LinearTask, start: Block, length: int, times: Any, query_inside: bool
) -> dict[str, Any]:
    """Rows of ``trajectory``, a time and a model each, and of ``apart``, a time each.

    Lemma E.1 of [S] bounds the distance of either flow to that on infinitely many tokens, which is
    one flow for both, so the sum of the two bounds is one on the distance between them.
    """
    flows = {
        kind: gradient_flow(task, start, length, kind, times, None, query_inside) for kind in KINDS
    }
    endless = gradient_flow(task, start, math.inf, times=times)
    soft, linear = (flow_bound(task, flows[kind], endless) for kind in KINDS)
    rows = []
    for kind, flow in [*flows.items(), ("limit", endless)]:
        for i, time in enumerate(times):
            at = flow.at(i)
            assert isinstance(at, Block)
            row = {"model": kind, "time": float(time), "mse": 2 * float(flow.risks[i])}
            row |= {"gradient": float(flow.gradients[i]), "v": float(at.v)}
            rows.append(row | {"U11": at.U11.flatten().tolist()})
    distances = pd.DataFrame(
        {
            "time": times,
            "distance": flows["softmax"].distance(flows["linear"]),
            "softmax_limit": soft.distance,
            "linear_limit": linear.distance,
            "bound": soft.bound + linear.bound,
            "sharper": soft.sharper + linear.sharper,
        }
    )
    return {"trajectory": rows, "apart": distances.to_dict("records")}


def _flow_columns(spec: FlowSpec) -> Declared:
    return columns.FLOW | (columns.TRAJECTORY if spec.trajectory else {})


def _stability_units(spec: StabilitySpec) -> list[Unit]:
    """Every setting for the first starts, then for the next: a run that is stopped has all
    settings.
    """
    for covariance in spec.covariances:
        as_task(covariance, spec.dim, spec.noise)
    return [
        {"covariance": covariance, "length": length, "first": first}
        for first in range(0, spec.starts, spec.block)
        for length in spec.lengths
        for covariance in spec.covariances
    ]


def _stability_unit(spec: StabilitySpec, unit: Unit) -> dict[str, Any]:
    """Flow both models from each start of the unit."""
    task, length = as_task(unit["covariance"], spec.dim, spec.noise), unit["length"]
    grid = np.geomspace(FIRST * spec.training, spec.until, spec.times - 1)
    times = np.union1d(grid, [0.0, spec.training])
    trained = int(np.searchsorted(times, spec.training))
    last = min(unit["first"] + spec.block, spec.starts)
    tables: dict[str, list[Any]] = {"flows": [], "curve": [], "distance": []}
    for start in range(unit["first"], last):
        own = {"covariance": unit["covariance"], "length": length, "seed": start}
        flows = pair_flows(task, length, spec.seed + start, times)
        for kind, flow in flows.items():
            end = flow_end(unit["covariance"], spec.dim, spec.noise, length, kind)
            found = summary(task, length, kind, flow, trained, end)
            tables["flows"].append(own | {"model": kind} | found)
            for i, time in enumerate(times):
                row = {"model": kind, "time": float(time), "mse": float(flow.mse[i])}
                row |= {"slope": float(flow.slopes[i]), "balance": balance(flow.at(i))}
                tables["curve"].append(own | row)
        for i, time in enumerate(times):
            plain, modulo, product = apart(*(flow.at(i) for flow in flows.values()))
            row = {"weights2": plain, "modulo2": modulo, "product2": product}
            tables["distance"].append(own | {"time": float(time)} | row)
        advance((start + 1 - unit["first"]) / (last - unit["first"]))
    return tables


def _stability_tables(spec: StabilitySpec, shards: Sequence[Shard]) -> dict[str, Any]:
    """flows, curve and distance of all units, and what they say of stability."""
    order = ["covariance", "length", "seed"]
    tables = {
        name: _joined(shards, name).sort_values(order, kind="stable", ignore_index=True)
        for name in ("flows", "curve", "distance")
    }
    flows, leads = tables["flows"], {}
    for name in spec.covariances:
        task = as_task(name, spec.dim, spec.noise)
        leads[name] = [start_lead(task, spec.seed + start) for start in range(spec.starts)]
    flows["lead"] = [
        leads[name][seed] for name, seed in zip(flows["covariance"], flows["seed"], strict=True)
    ]
    return tables | {"verdict": verdict(flows)}


def _first_weights(spec: ConcentrationSpec) -> OVKQ:
    """Where training of the spec's seed begins."""
    return default_weights(spec.dim, torch.Generator().manual_seed(spec.seed))


def _concentration_unit(spec: ConcentrationSpec, unit: Unit) -> dict[str, Any]:
    """Mean squares of each repeat, and the exact difference of the risks' gradients."""
    task, weights, n = _task(spec, unit["covariance"]), _first_weights(spec), unit["n"]
    squared = prompt_errors(task, weights, n, spec.repeats * spec.prompts, spec.unit_seed(unit))
    means = squared.reshape(spec.repeats, spec.prompts, 2, len(METRICS)).mean(axis=1)
    rows = [
        unit | {"against": against, "metric": metric, "repeat": repeat, "squared": float(value)}
        for i, against in enumerate(AGAINST)
        for j, metric in enumerate(METRICS)
        for repeat, value in enumerate(means[:, i, j])
    ]
    exact = risk_gradient_errors(task, weights, n)
    to_limit = squared[:, AGAINST.index("limit")]
    output, gradient = to_limit[:, 0], to_limit[:, 1] + to_limit[:, 2]
    norms = output.mean() ** 0.5, (output**2).mean() ** 0.25, gradient.mean() ** 0.5
    return {
        "errors": rows,
        "risks": [unit | row for row in risk_gaps(task, weights.uv(), n, *map(float, norms))],
        "exact": [
            unit | {"against": against, "error": float(value)}
            for against, value in zip(AGAINST, exact, strict=True)
        ],
    }


def _concentration_tables(spec: ConcentrationSpec, shards: Sequence[Shard]) -> dict[str, Any]:
    """errors; curves (rms and standard error); rates (fitted exponents with intervals); bounds."""
    errors, exact, risks = (_joined(shards, name) for name in ("errors", "exact", "risks"))
    curves: list[pd.DataFrame] = []
    rates: list[dict[str, Any]] = []

    def append(key: dict[str, Any], curve: ErrorCurve) -> None:
        fit = fit_rate(curve, raise_on_failure=False)
        shown = pd.DataFrame({"n": curve.n, "rms": curve.rms, "stderr": curve.stderr})
        curves.append(shown.assign(**key))
        low, high = fit.interval
        found = {"exponent": fit.exponent, "low": low, "high": high, "constant": fit.constant}
        rates.append(key | found | {"status": fit.status.code, "reason": fit.status.text})

    keys = ["covariance", "against", "metric"]
    for key, part in errors.groupby(keys, sort=False):
        samples = part.pivot_table(index="repeat", columns="n", values="squared")
        lengths = samples.columns.to_numpy(np.int64)
        curve = ErrorCurve.from_repeats(lengths, samples.to_numpy(np.float64))
        append(dict(zip(keys, key, strict=True)), curve)
    for key, part in exact.groupby(keys[:2], sort=False):
        ordered = part.sort_values("n")
        lengths, values = ordered["n"].to_numpy(np.int64), ordered["error"].to_numpy()
        curve = ErrorCurve(lengths, values, "exact", "risk_gradient")
        append(dict(zip(keys, (*key, "risk_gradient"), strict=True)), curve)
    weights, lengths = _first_weights(spec), sorted(spec.lengths)
    limits = [
        bounds(_task(spec, name), weights, lengths, spec.seed).assign(covariance=name)
        for name in spec.covariances
    ]
    return {
        "errors": errors,
        "exact": exact,
        "curves": pd.concat(curves, ignore_index=True),
        "rates": pd.DataFrame(rates),
        "risks": risks,
        "bounds": pd.concat(limits, ignore_index=True),
    }


TRAIN = Job(
    "icl-train",
    TrainSpec,
    _train_units,
    _train_unit,
    _train_tables,
    columns=lambda _: columns.TRAIN,
)
FLOW = Job("icl-flow", FlowSpec, _units, _flow_unit, columns=_flow_columns)
STABILITY = Job(
    "icl-stability",
    StabilitySpec,
    _stability_units,
    _stability_unit,
    _stability_tables,
    columns=lambda _: columns.STABILITY,
)
CONCENTRATION = Job(
    "icl-concentration",
    ConcentrationSpec,
    lambda spec: _units(spec, "n"),
    _concentration_unit,
    _concentration_tables,
    columns=lambda _: columns.CONCENTRATION,
)
