"""Paired SGD as a run: a unit is one covariance, one prompt length, one seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pandas as pd

from esscher.icl.columns import COVARIANCE, LENGTH, MODEL, MSE, SEED, STATUS, STDERR
from esscher.icl.tasks import as_task
from esscher.icl.training.spec import TrainSpec
from esscher.icl.training.train import Settings, train
from esscher.runs import Job, Shard, Unit
from esscher.runs.columns import Column
from esscher.runs.progress import advance

__all__ = ["TRAIN"]

UNIT = (COVARIANCE, LENGTH, SEED)
STEP = Column(
    "step",
    "int",
    "step",
    "Steps of training so far; of a model that diverged, the step at which it did.",
    "log",
)
LOSS = Column(
    "loss",
    "float",
    "loss",
    "Mean loss of the batches since the last record; at the end, that of the last batch.",
    "log",
)
TABLES = {
    "curve": (STEP, MODEL, LOSS, MSE, STDERR, *UNIT),
    "distance": (
        STEP,
        Column(
            "distance2",
            "float",
            "squared distance",
            "Squared distance between the parameters of the two models.",
            "log",
        ),
        *UNIT,
    ),
    "path": (
        STEP,
        MODEL,
        Column(
            "values",
            "list",
            "parameters",
            "U without its last column and the last row of OV, row by row, head by head.",
        ),
        *UNIT,
    ),
    "final": (
        *(MODEL, MSE, STDERR, STATUS, STEP, LOSS),
        Column(
            "advice", "word", "advice", "What happened to a model that diverged, and what helps."
        ),
        Column("O", "list", "O", "Output map, flattened, head by head."),
        Column("V", "list", "V", "Value map, flattened, head by head."),
        Column("K", "list", "K", "Key map, flattened, head by head."),
        Column("Q", "list", "Q", "Query map, flattened, head by head."),
        *UNIT,
    ),
}


def units(spec: TrainSpec) -> list[Unit]:
    """Short prompts first: they take the least time."""
    for covariance in spec.covariances:
        as_task(covariance, spec.dim, spec.noise, spec.task_cov)
    return [
        {"covariance": covariance, "length": length, "seed": seed}
        for length in spec.lengths
        for seed in range(spec.seeds)
        for covariance in spec.covariances
    ]


def compute(spec: TrainSpec, unit: Unit) -> dict[str, Any]:
    """Train one pair; the seed alone decides the first weights, so all lengths and covariances
    share them.
    """
    shared = {field.name for field in fields(Settings)} & set(TrainSpec.model_fields) - {"seed"}
    seeds = {"seed": spec.seed + unit["seed"], "prompt_seed": spec.unit_seed(unit)}
    settings = Settings(**spec.model_dump(include=shared), **seeds)
    task = as_task(unit["covariance"], spec.dim, spec.noise, spec.task_cov)
    training = train(
        task,
        unit["length"],
        settings,
        raise_on_divergence=False,
        progress=lambda done, of: advance(done / of),
    )
    return {name: getattr(training, name).assign(**unit) for name in TABLES}


def consolidate(spec: TrainSpec, shards: Sequence[Shard]) -> dict[str, Any]:
    """curve, distance, path and final of all units."""
    return {
        name: pd.concat([shard.tables[name].to_pandas() for shard in shards], ignore_index=True)
        for name in TABLES
    }


TRAIN = Job("icl-train", TrainSpec, units, compute, consolidate, columns=lambda _: TABLES)
