"""Paired SGD as a run: a unit is one covariance, one prompt length, one seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field, field_validator

from esscher.icl.tasks import LinearTask
from esscher.icl.training.train import train
from esscher.runs import Job, RunSpec, Shard, Unit, register

__all__ = ["TRAIN", "TrainSpec", "as_task"]


def as_task(covariance: str, dim: int, noise: float = 0.1) -> LinearTask:
    """The task of a covariance given in words: isotropic, kms:RHO (rho^|i-j|) or diag:A,B,...; W = I/d."""
    name, _, numbers = covariance.partition(":")
    try:
        values = [float(number) for number in numbers.split(",")] if numbers else []
    except ValueError as cause:
        raise ValueError(f"covariance: expected numbers after the colon, got {covariance!r}") from cause
    if name == "isotropic" and not values:
        return LinearTask.isotropic(dim, noise=noise)
    if name == "kms" and len(values) <= 1:
        return LinearTask.kms(dim, values[0] if values else 0.5, noise=noise)
    if name == "diag" and len(values) == dim:
        return LinearTask([[value if i == j else 0.0 for j in range(dim)] for i, value in enumerate(values)], noise=noise)
    raise ValueError(f"covariance: expected isotropic, kms:RHO or diag: with {dim} numbers, got {covariance!r}")


class TrainSpec(RunSpec):
    """What ``esscher icl train`` runs; the defaults are the experiments of [S], appendix A."""

    job: Literal["icl-train"] = "icl-train"
    covariances: Annotated[tuple[str, ...], Field(min_length=1)] = ("isotropic", "kms:0.5")
    lengths: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = (10, 100, 1000)
    seeds: Annotated[int, Field(ge=1, le=10_000)] = 3
    dim: Annotated[int, Field(ge=1, le=4096)] = 5
    noise: Annotated[float, Field(ge=0)] = 0.1
    steps: Annotated[int, Field(ge=1, le=10**9)] = 500_000
    batch: Annotated[int, Field(ge=1, le=1 << 20)] = 128
    rate: Annotated[float, Field(gt=0)] = 1e-3
    optimizer: Literal["sgd", "adam"] = "sgd"
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Annotated[int, Field(ge=0, le=10**9)] = 0
    heads: Annotated[int, Field(ge=1, le=1024)] = 1
    records: Annotated[int, Field(ge=1, le=10**6)] = 200
    evaluation: Annotated[int, Field(ge=2, le=10**9)] = 4096
    final_evaluation: Annotated[int, Field(ge=2, le=10**9)] = 100_000
    bound: Annotated[float, Field(gt=0)] = 1e4

    @field_validator("lengths")
    @classmethod
    def _small_first(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(value)))

    @field_validator("covariances")
    @classmethod
    def _named(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(value))


def units(spec: TrainSpec) -> list[Unit]:
    """Short prompts first: they take the least time."""
    for covariance in spec.covariances:
        as_task(covariance, spec.dim, spec.noise)
    return [
        {"covariance": covariance, "length": length, "seed": seed}
        for length in spec.lengths
        for seed in range(spec.seeds)
        for covariance in spec.covariances
    ]


def compute(spec: TrainSpec, unit: Unit) -> dict[str, Any]:
    """Train one pair; the seed alone decides the first weights, so all lengths and covariances share them."""
    training = train(
        as_task(unit["covariance"], spec.dim, spec.noise),
        unit["length"],
        seed=spec.seed + unit["seed"],
        prompt_seed=spec.unit_seed(unit),
        raise_on_divergence=False,
        **spec.model_dump(
            include={
                "steps",
                "batch",
                "rate",
                "optimizer",
                "schedule",
                "warmup",
                "heads",
                "records",
                "evaluation",
                "final_evaluation",
                "bound",
            }
        ),
    )
    tables = {"curve": training.curve, "distance": training.distance, "path": training.path, "final": training.final}
    return {name: table.assign(**unit) for name, table in tables.items()}


def consolidate(spec: TrainSpec, shards: Sequence[Shard]) -> dict[str, Any]:
    """curve, distance, path and final of all units."""
    names = ("curve", "distance", "path", "final")
    return {name: pd.concat([shard.tables[name].to_pandas() for shard in shards], ignore_index=True) for name in names}


TRAIN = Job("icl-train", TrainSpec, units, compute, consolidate)
register("icl-train", "esscher.icl.training.job:TRAIN")
