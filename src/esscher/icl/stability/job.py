"""Flows of both models from the same first weights as a run: a unit is one covariance, one prompt
length and a few starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
import torch

from esscher.icl.columns import COVARIANCE, LENGTH, MODEL, MSE, SEED, STATUS
from esscher.icl.comparison import ABOVE, STUCK
from esscher.icl.flow.end import final_parameters
from esscher.icl.flow.limit import start_block
from esscher.icl.layer import KINDS, UV, default_weights
from esscher.icl.risk.exact import risk
from esscher.icl.risk.softmax_general import product_rule
from esscher.icl.stability.distance import apart, balance
from esscher.icl.stability.flow import WeightFlow, weight_flow
from esscher.icl.stability.gradient import PopulationRisk
from esscher.icl.stability.spec import StabilitySpec
from esscher.icl.stability.verdict import verdict
from esscher.icl.tasks import LinearTask, as_task
from esscher.icl.training.white import Weights, weights_of, white_task, whiten
from esscher.runs import Job, Shard, Unit
from esscher.runs.columns import Column
from esscher.runs.progress import advance

__all__ = ["STABILITY", "pair_flows", "summary"]

ROTATIONS = 2  # of the cubature that gives the error where a flow ends
# norm of the gradient of the risk below which a flow is said to stay; it begins near 0.1 and passes
# 0.3
SLOW = 0.01
FIRST = 1e-4  # of the time of training: the first time recorded after 0

UNIT = (COVARIANCE, LENGTH, SEED)
TIME = Column(
    "time", "float", "time", "Time of the flow: twice the rate of SGD times its steps.", "log"
)
SLOPE = Column(
    "slope", "float", "gradient", "Norm of the gradient of the risk in (o, V, K, Q).", "log"
)
LEAD = Column(
    "lead",
    "float",
    "lead",
    "At the start: alignment of the block form with the task, less its mirror image's.",
)


def _shares(kind: str) -> tuple[Column, ...]:
    """What is told of the starts of one model."""
    low, high = f"{kind}_low", f"{kind}_high"
    return (
        Column(
            kind,
            "float",
            f"{kind} stuck",
            "Share of starts that are stuck after training.",
            ends=(low, high),
        ),
        *(
            Column(key, "float", f"{key.replace('_', ', ')}", "End of its 95 % interval.")
            for key in (low, high)
        ),
        Column(
            f"{kind}_never",
            "float",
            f"{kind}, never",
            "Share of starts that have not arrived when the flow is stopped.",
        ),
        Column(
            f"{kind}_lead",
            "float",
            f"{kind}, lead",
            "Chance that a stuck start has a smaller lead than another.",
        ),
    )


TABLES = {
    "flows": (
        *UNIT,
        MODEL,
        STATUS,
        MSE,
        Column(
            "error",
            "float",
            "error",
            "Standard error of the cubature behind the mean squared error.",
        ),
        Column(
            "end",
            "float",
            "end of the block form",
            "Mean squared error where the flow of the block form ends.",
            "log",
        ),
        Column(
            "last",
            "float",
            "last error",
            "Mean squared error where the flow was stopped, long after training.",
            "log",
        ),
        Column(
            "arrival",
            "float",
            "arrival",
            "Time from which on the error is within 5 % of the end; none if never.",
            "log",
        ),
        Column(
            "stay",
            "float",
            "stay",
            "Time of training before arrival with a gradient of norm below 0.01.",
            "log",
        ),
        Column(
            "plateau",
            "float",
            "plateau",
            "Mean squared error where the gradient was smallest then.",
            "log",
        ),
        Column("slowest", "float", "slowest", "Norm of the gradient there.", "log"),
        Column("values", "list", "weights", "o, V, K, Q after training, row by row."),
        LEAD,
    ),
    "curve": (
        *UNIT,
        MODEL,
        TIME,
        MSE,
        SLOPE,
        Column(
            "balance",
            "float",
            "balance",
            "|K|^2 + |Q|^2 - |o|^2 - |V|^2; the flow of linear attention keeps it.",
        ),
    ),
    "distance": (
        *UNIT,
        TIME,
        Column(
            "weights2",
            "float",
            "distance of the weights",
            "Squared distance between the weights (o, V, K, Q).",
            "log",
        ),
        Column(
            "modulo2",
            "float",
            "distance modulo scale",
            "The same, least over the scale linear attention ignores.",
            "log",
        ),
        Column(
            "product2",
            "float",
            "distance of the products",
            "Squared distance between value times score maps.",
            "log",
        ),
    ),
    "verdict": (
        COVARIANCE,
        LENGTH,
        Column("starts", "int", "starts", "First weights, the same for both models."),
        *(column for kind in KINDS for column in _shares(kind)),
        Column(
            "only_softmax",
            "int",
            "softmax alone",
            "Starts that are stuck more often for softmax attention.",
        ),
        Column(
            "only_linear",
            "int",
            "linear alone",
            "Starts that are stuck more often for linear attention.",
        ),
        Column(
            "p",
            "float",
            "p",
            "Exact two-sided sign test; of single settings corrected by Holm's method.",
            "log",
        ),
    ),
}


def units(spec: StabilitySpec) -> list[Unit]:
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


def compute(spec: StabilitySpec, unit: Unit) -> dict[str, Any]:
    """Flow both models from each start of the unit."""
    task, length = as_task(unit["covariance"], spec.dim, spec.noise), unit["length"]
    grid = np.geomspace(FIRST * spec.training, spec.until, spec.times - 1)
    times = np.union1d(grid, [0.0, spec.training])
    trained = int(np.searchsorted(times, spec.training))
    last = min(unit["first"] + spec.block, spec.starts)
    tables: dict[str, list[Any]] = {"flows": [], "curve": [], "distance": []}
    for start in range(unit["first"], last):
        identity = {"covariance": unit["covariance"], "length": length, "seed": start}
        flows = pair_flows(task, length, spec.seed + start, times)
        for kind, flow in flows.items():
            end = block_end(unit["covariance"], spec.dim, spec.noise, length, kind)
            tables["flows"].append(
                identity | {"model": kind} | summary(task, length, kind, flow, trained, end)
            )
            tables["curve"] += [identity | {"model": kind} | row for row in _curve(flow)]
        tables["distance"] += [identity | row for row in _distances(*flows.values())]
        advance((start + 1 - unit["first"]) / (last - unit["first"]))
    return tables


def pair_flows(
    task: LinearTask, length: float | int, seed: int, times: Any
) -> dict[str, WeightFlow]:
    """The flows of both models from the first weights that ``train`` draws with this seed."""
    start = weights_of(default_weights(task.dim, torch.Generator().manual_seed(seed)))
    return {
        kind: weight_flow(PopulationRisk(task, length, kind), start, np.asarray(times, np.float64))
        for kind in KINDS
    }


def start_lead(task: LinearTask, seed: int) -> float:
    """v <C, A> - <a, C r> at the first weights of a seed, C = E omega omega^T in white coordinates
    (``gradient``).

    To first order in the products of weights both terms are what prediction and label have in
    common, E kappa y: that of the block form, and that of its mirror image (``traps``). The flow
    lets the larger grow first.
    """
    white_of = white_task(task)
    white = whiten(
        weights_of(default_weights(task.dim, torch.Generator().manual_seed(seed))), white_of.root
    )
    C = white_of.task_root @ white_of.task_root.T
    return float(white[-1, -1] * np.sum(C * white[:-1, :-1]) - white[-1, :-1] @ C @ white[:-1, -1])


def summary(
    task: LinearTask, length: float | int, kind: str, flow: WeightFlow, trained: int, end: float
) -> dict[str, Any]:
    """Where a flow is at the time numbered ``trained``, when it arrives, and where it stays before.

    ``end`` is the error at the end of the block form's flow: within 5 % of it a flow has arrived.
    """
    found = risk(task, _uv(flow.at(trained)), length, kind, product_rule(task.dim, ROTATIONS))
    above = np.flatnonzero(flow.mse > (1 + ABOVE) * end)
    arrival = int(above[-1]) + 1 if above.size else 0
    before = max(1, min(arrival, trained + 1))
    slopes = flow.slopes[:before]
    slowest = int(np.argmin(slopes))
    return {
        "status": "ok" if 2 * found.value <= (1 + ABOVE) * end else STUCK,
        "mse": 2 * found.value,
        "error": 2 * found.error,
        "end": end,
        "last": float(flow.mse[-1]),
        "arrival": float(flow.times[arrival]) if arrival < flow.times.size else math.nan,
        "stay": float(np.diff(flow.times[:before])[slopes[:-1] < SLOW].sum()),
        "plateau": float(flow.mse[slowest]),
        "slowest": float(slopes[slowest]),
        "values": flow.states[trained].tolist(),
    }


@lru_cache(maxsize=256)
def block_end(covariance: str, dim: int, noise: float, length: int, kind: str) -> float:
    """Mean squared error where the flow of the block form ends."""
    task = as_task(covariance, dim, noise)
    return 2 * float(
        risk(task, final_parameters(task, start_block(task), length, kind), length, kind)
    )


def _curve(flow: WeightFlow) -> Iterator[dict[str, float]]:
    for i, (time, mse, slope) in enumerate(zip(flow.times, flow.mse, flow.slopes, strict=True)):
        yield {
            "time": float(time),
            "mse": float(mse),
            "slope": float(slope),
            "balance": balance(flow.at(i)),
        }


def _distances(one: WeightFlow, two: WeightFlow) -> Iterator[dict[str, float]]:
    for i, time in enumerate(one.times):
        plain, modulo, product = apart(one.at(i), two.at(i))
        yield {"time": float(time), "weights2": plain, "modulo2": modulo, "product2": product}


def _uv(weights: Weights) -> UV:
    U, V = (
        torch.zeros(weights.V.shape[1], weights.V.shape[1], dtype=torch.float64) for _ in range(2)
    )
    U[:] = torch.from_numpy(weights.K.T @ weights.Q)
    V[-1] = torch.from_numpy(weights.V.T @ weights.o)
    return UV(U, V)


def consolidate(spec: StabilitySpec, shards: Sequence[Shard]) -> dict[str, Any]:
    """flows, curve and distance of all units, and what they say of stability."""
    names = ("flows", "curve", "distance")
    tables = {
        name: pd.concat([shard.tables[name].to_pandas() for shard in shards], ignore_index=True)
        for name in names
    }
    order = ["covariance", "length", "seed"]
    for name in names:
        tables[name] = tables[name].sort_values(order, kind="stable", ignore_index=True)
    flows = tables["flows"]
    tasks = {name: as_task(name, spec.dim, spec.noise) for name in spec.covariances}
    leads = {
        name: [start_lead(task, spec.seed + start) for start in range(spec.starts)]
        for name, task in tasks.items()
    }
    flows["lead"] = [
        leads[name][seed] for name, seed in zip(flows["covariance"], flows["seed"], strict=True)
    ]
    return tables | {"verdict": verdict(flows)}


STABILITY = Job(
    "icl-stability", StabilitySpec, units, compute, consolidate, columns=lambda _: TABLES
)
