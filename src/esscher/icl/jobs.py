"""The runs of the lab: training, flow, stability and concentration, in units of work, and the
columns of their tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from esscher.errors.curve import STDERR, ErrorCurve
from esscher.errors.rate import fit_rate
from esscher.icl.concentration import (
    AGAINST,
    METRICS,
    bounds,
    prompt_errors,
    risk_gradient_errors,
)
from esscher.icl.exact import bayes_risk
from esscher.icl.layer import KINDS, OVKQ, default_weights
from esscher.icl.specs import ConcentrationSpec, FlowSpec, StabilitySpec, TrainSpec
from esscher.icl.stability import (
    ABOVE,
    apart,
    backtracking,
    flow_end,
    judged,
    pair_flows,
    verdict,
)
from esscher.icl.training import train
from esscher.runs import Job, Shard, Unit, concatenate
from esscher.runs.columns import Column
from esscher.runs.progress import advance

FIRST = 1e-4  # of the time of training: the first time of a stability run recorded after 0

Spec = TrainSpec | FlowSpec | StabilitySpec | ConcentrationSpec


# What every column of a table is: kind (log and words: with the scale of a picture), label, help.
WORDS = {
    "covariance": ("word", "covariance", "Covariance of x: isotropic, kms:RHO or diag:A,B,..."),
    "length": ("int log", "prompt length", "Labelled tokens in a prompt."),
    "n": ("int log", "prompt length", "Labelled tokens in a prompt."),
    "seed": ("int", "seed", "Number of the first weights."),
    "model": ("words", "model", "softmax or linear attention; bayes is the best predictor."),
    "mse": ("log", "mean squared error", "Mean squared error of the query's noisy label."),
    "status": ("words", "status", "ok, diverged, or stuck or undertrained above its flow's end."),
    "step": ("int log", "step", "Steps of training so far; where a model diverged, that step."),
    "loss": ("log", "loss", "Mean over the batches since the last record; at the end, the last."),
    "distance2": ("log", "squared distance", "Squared distance of the two models' parameters."),
    "advice": ("word", "advice", "What happened to a model that is not ok, and what helps."),
    "O": ("list", "O", "Output map, flattened."),
    "V": ("list", "V", "Value map, flattened."),
    "K": ("list", "K", "Key map, flattened."),
    "Q": ("list", "Q", "Query map, flattened."),
    "time": ("log", "time", "Time of the gradient flow: twice the rate of SGD times its steps."),
    "end": ("log", "end of the block form", "Error where the flow of the block form ends."),
    "weights2": ("log", "distance of the weights", "Squared distance between (o, V, K, Q)."),
    "product2": ("log", "distance of the products", "Squared distance of value times score maps."),
    "undone": ("float", "undone", "Share of the log distance's variation that the flow undoes."),
    "starts": ("int", "starts", "First weights, the same for both models."),
    "p": ("log", "p", "Exact two-sided sign test over the starts that differ."),
    "against": ("words", "against", "linear attention on the same prompt, or the limit of both."),
    "metric": ("words", "difference of", "The output, its gradients, or those of loss and risk."),
    "repeat": ("int", "repeat", "Number of the group of prompts."),
    "squared": ("log", "squared difference", "Mean over a group of prompts."),
    "error": ("log", "difference", "Norm of the difference of the exact gradients of the error."),
    "rms": ("log", "rms difference", "Root mean square over prompts; of a bound, its height."),
    "exponent": ("float", "exponent", "The difference, or the bound, falls as n to minus this."),
    "low": ("float", "exponent, low", "Lower end of the exponent's interval."),
    "high": ("float", "exponent, high", "Upper end of the exponent's interval."),
    "constant": ("log", "constant", "The difference is this times n to minus the exponent."),
    "reason": ("word", "reason", "What the status of the fit means."),
    "name": ("word", "bound", "Name of the bound."),
} | {
    key: told
    for kind in KINDS
    for key, told in {
        kind: ("float", f"{kind} stuck", "Share of starts that are stuck after training."),
        f"{kind}_low": ("float", f"{kind}, low", "End of its 95 % interval."),
        f"{kind}_high": ("float", f"{kind}, high", "End of its 95 % interval."),
        f"only_{kind}": ("int", f"{kind} alone", f"Starts stuck more often for {kind} attention."),
    }.items()
}
SCALED = {"log": "float", "int log": "int", "words": "word"}
ENDS = {"exponent": ("low", "high")} | {kind: (f"{kind}_low", f"{kind}_high") for kind in KINDS}


def _declared(tables: dict[str, str]) -> dict[str, tuple[Column, ...]]:
    """The columns of tables, each a line of keys."""

    def column(key: str) -> Column:
        if key == "stderr":
            return STDERR
        kind, label, text = WORDS[key]
        scale: Any = kind.split()[-1] if kind in SCALED else None
        known: Any = SCALED.get(kind, kind)
        return Column(key, known, label, text, scale, ends=ENDS.get(key))

    return {name: tuple(map(column, keys.split())) for name, keys in tables.items()}


STARTED = "covariance length seed"
SHARES = "softmax softmax_low softmax_high linear linear_low linear_high"
TRAINED = _declared(
    {
        "curve": f"step model loss mse stderr {STARTED}",
        "distance": f"step distance2 {STARTED}",
        "final": f"model mse stderr status step loss advice O V K Q {STARTED}",
    }
)
FLOWED = _declared({"final": "covariance length model mse stderr"})
STARTS = _declared(
    {
        "flows": f"{STARTED} model status mse end",
        "distance": f"{STARTED} time weights2 product2",
        "backtracking": "covariance length undone",
        "verdict": f"covariance length starts only_softmax only_linear {SHARES} p",
    }
)
CONCENTRATED = _declared(
    {
        "errors": "covariance n against metric repeat squared",
        "exact": "covariance n against error",
        "curves": "n rms stderr covariance against metric",
        "rates": "covariance against metric exponent low high constant status reason",
        "bounds": "metric name n rms exponent covariance",
    }
)


def _check(spec: Spec) -> None:
    """A mistake in a covariance or a device is told before anything is computed."""
    if spec.device != "cpu" and not isinstance(spec, TrainSpec):
        raise ValueError(f"device: {spec.job} is computed on the CPU, got {spec.device!r}")
    for covariance in spec.covariances:
        spec.task(covariance)


def _units(spec: Spec, name: str = "length") -> list[Unit]:
    """Every covariance and length, short prompts first: they take the least time."""
    both = itertools.product(spec.lengths, spec.covariances)
    return [{"covariance": covariance, name: length} for length, covariance in both]


def _train_units(spec: TrainSpec) -> list[Unit]:
    """Short prompts first; the seeds of a length one after the other."""
    every = itertools.product(spec.lengths, range(spec.seeds), spec.covariances)
    return [{"covariance": name, "length": length, "seed": seed} for length, seed, name in every]


def _train_unit(spec: TrainSpec, unit: Unit) -> dict[str, Any]:
    """Train one pair and judge both models by the end of their flow; the seed alone decides the
    first weights, so all lengths and covariances share them.
    """
    seeded = spec.model_copy(update={"seed": spec.seed + unit["seed"]})
    task, prompts = spec.task(unit["covariance"]), spec.unit_seed(unit)
    tables = train(task, unit["length"], seeded, prompt_seed=prompts)
    tables = {name: table.assign(**unit) for name, table in tables.items()}
    return tables | {"final": judged(task, tables["final"], tables["curve"])}


def _flow_unit(spec: FlowSpec, unit: Unit) -> dict[str, Any]:
    """Mean squared error (twice the risk) at the end of the flow of each model, and of the best
    predictor on L tokens.
    """
    task, length = spec.task(unit["covariance"]), unit["length"]
    rows = [{"model": kind, "mse": flow_end(task, length, kind), "stderr": 0.0} for kind in KINDS]
    generator = torch.Generator().manual_seed(spec.unit_seed(unit))
    bayes = bayes_risk(task, length, generator=generator)
    rows.append({"model": "bayes", "mse": 2 * bayes.value, "stderr": 2 * bayes.error})
    return {"final": [unit | row for row in rows]}


def _stability_units(spec: StabilitySpec) -> list[Unit]:
    """Every setting for the first starts, then for the next: a run that is stopped has all
    settings.
    """
    firsts = range(0, spec.starts, spec.block)
    return [unit | {"first": first} for first in firsts for unit in _units(spec)]


def _stability_unit(spec: StabilitySpec, unit: Unit) -> dict[str, Any]:
    """Flow both models from each start of the unit."""
    task, length = spec.task(unit["covariance"]), unit["length"]
    until = max(spec.until, spec.training)
    grid = np.geomspace(FIRST * spec.training, until, spec.times - 1)
    times = np.union1d(grid, [0.0, spec.training])
    trained = int(np.searchsorted(times, spec.training))
    last = min(unit["first"] + spec.block, spec.starts)
    ends = {kind: flow_end(task, length, kind) for kind in KINDS}
    tables: dict[str, list[Any]] = {"flows": [], "distance": []}
    for start in range(unit["first"], last):
        own = {"covariance": unit["covariance"], "length": length, "seed": start}
        flows = pair_flows(task, length, spec.seed + start, times)
        for kind, flow in flows.items():
            mse = 2 * float(flow.risks[trained])
            status = "ok" if mse <= (1 + ABOVE) * ends[kind] else "stuck"
            row = {"model": kind, "status": status, "mse": mse, "end": ends[kind]}
            tables["flows"].append(own | row)
        for i, time in enumerate(times):
            weights, product = apart(*(flow.at(i) for flow in flows.values()))
            row = {"time": float(time), "weights2": weights, "product2": product}
            tables["distance"].append(own | row)
        advance((start + 1 - unit["first"]) / (last - unit["first"]))
    return tables


def _stability_tables(spec: StabilitySpec, shards: Sequence[Shard]) -> dict[str, Any]:
    """flows and distance of all units, and what they say of stability."""
    tables = {
        name: table.to_pandas().sort_values(STARTED.split(), kind="stable", ignore_index=True)
        for name, table in concatenate(spec, shards).items()
    }
    told = {"verdict": verdict(tables["flows"]), "backtracking": backtracking(tables["distance"])}
    return tables | told


def _first_weights(spec: ConcentrationSpec) -> OVKQ:
    """Where training of the spec's seed begins."""
    return default_weights(spec.dim, torch.Generator().manual_seed(spec.seed))


def _concentration_unit(spec: ConcentrationSpec, unit: Unit) -> dict[str, Any]:
    """Mean squares of each repeat, and the exact difference of the risks' gradients."""
    task, weights, n = spec.task(unit["covariance"]), _first_weights(spec), unit["n"]
    squared = prompt_errors(task, weights, n, spec.repeats * spec.prompts, spec.unit_seed(unit))
    means = squared.reshape(spec.repeats, spec.prompts, 2, len(METRICS)).mean(axis=1)
    rows = [
        unit | {"against": against, "metric": metric, "repeat": repeat, "squared": float(value)}
        for i, against in enumerate(AGAINST)
        for j, metric in enumerate(METRICS)
        for repeat, value in enumerate(means[:, i, j])
    ]
    exact = risk_gradient_errors(task, weights, n)
    return {
        "errors": rows,
        "exact": [
            unit | {"against": against, "error": float(value)}
            for against, value in zip(AGAINST, exact, strict=True)
        ],
    }


def _concentration_tables(spec: ConcentrationSpec, shards: Sequence[Shard]) -> dict[str, Any]:
    """errors; curves (rms and standard error); rates (fitted exponents with intervals); bounds."""
    joined = concatenate(spec, shards)
    errors, exact = joined["errors"].to_pandas(), joined["exact"].to_pandas()
    keys = ["covariance", "against", "metric"]
    known: dict[tuple[Any, ...], ErrorCurve] = {}
    for key, part in errors.groupby(keys, sort=False):
        samples = part.pivot_table(index="repeat", columns="n", values="squared")
        n = samples.columns.to_numpy(np.int64)
        known[key] = ErrorCurve.from_repeats(n, samples.to_numpy(np.float64))
    for key, part in exact.groupby(keys[:2], sort=False):
        n, values = part.sort_values("n")[["n", "error"]].to_numpy().T
        known[*key, "risk_gradient"] = ErrorCurve(n.astype(np.int64), values, "exact", "error")
    curves, rates = [], []
    for key, curve in known.items():
        place: dict[str, Any] = dict(zip(keys, key, strict=True))
        shown = pd.DataFrame({"n": curve.n, "rms": curve.rms, "stderr": curve.stderr})
        curves.append(shown.assign(**place))
        fit = fit_rate(curve, raise_on_failure=False)
        place |= {"exponent": fit.exponent, "low": fit.interval[0], "high": fit.interval[1]}
        place |= {"constant": fit.constant, "status": fit.status.code, "reason": fit.status.text}
        rates.append(place)
    weights, lengths = _first_weights(spec), sorted(spec.lengths)
    limits = [
        bounds(spec.task(name), weights, lengths, spec.seed).assign(covariance=name)
        for name in spec.covariances
    ]
    return {
        "errors": errors,
        "exact": exact,
        "curves": pd.concat(curves, ignore_index=True),
        "rates": pd.DataFrame(rates),
        "bounds": pd.concat(limits, ignore_index=True),
    }


TRAIN = Job(
    "icl-train", TrainSpec, _train_units, _train_unit, columns=lambda _: TRAINED, check=_check
)
FLOW = Job("icl-flow", FlowSpec, _units, _flow_unit, columns=lambda _: FLOWED, check=_check)
STABILITY = Job(
    "icl-stability",
    StabilitySpec,
    _stability_units,
    _stability_unit,
    _stability_tables,
    columns=lambda _: STARTS,
    check=_check,
)
CONCENTRATION = Job(
    "icl-concentration",
    ConcentrationSpec,
    lambda spec: _units(spec, "n"),
    _concentration_unit,
    _concentration_tables,
    columns=lambda _: CONCENTRATED,
    check=_check,
)
