"""What ``esscher icl train`` runs, as plain data."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from esscher.icl.spec import Covariances, Dim, Lengths, Noise, TaskCov
from esscher.runs import RunSpec, register

__all__ = ["PAPER", "Loss", "Optimizer", "Schedule", "TrainSpec"]

Optimizer = Literal["sgd", "adam"]
Loss = Literal["square", "half"]
Schedule = Literal["constant", "linear", "cosine"]


class TrainSpec(RunSpec):
    """What ``esscher icl train`` runs; the defaults are the experiments of [S], appendix A."""

    job: Literal["icl-train"] = "icl-train"
    covariances: Covariances = ("isotropic", "kms:0.5")
    lengths: Lengths = (10, 100, 1000)
    seeds: int = Field(
        default=3, ge=1, le=10_000, description="how many first weights are trained from"
    )
    dim: Dim = 5
    noise: Noise = 0.1
    task_cov: TaskCov = "scaled"
    steps: int = Field(default=500_000, ge=1, le=10**9, description="steps of training")
    batch: int = Field(default=128, ge=1, le=1 << 20, description="prompts in a step")
    rate: float = Field(default=1e-3, gt=0, description="learning rate")
    optimizer: Optimizer = Field(default="sgd", description="optimizer: sgd or adam")
    loss: Loss = Field(
        default="square",
        description="loss: square, or half of it as [S] writes; SGD on half is half the rate",
    )
    schedule: Schedule = Field(
        default="constant", description="course of the rate: constant, linear or cosine"
    )
    warmup: int = Field(default=0, ge=0, le=10**9, description="steps over which the rate rises")
    heads: int = Field(
        default=1, ge=1, le=1024, description="heads of each model; more than one is slower"
    )
    records: int = Field(
        default=200, ge=1, le=10**6, description="steps at which training is recorded, about"
    )
    evaluation: int = Field(
        default=4096, ge=2, le=10**9, description="prompts that measure the error at each"
    )
    final_evaluation: int = Field(
        default=100_000, ge=2, le=10**9, description="prompts that measure it at the end"
    )
    bound: float = Field(
        default=1e4, gt=0, description="a batch whose loss is not below this stops its model"
    )

    @field_validator("lengths")
    @classmethod
    def _small_first(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(value)))

    @field_validator("covariances")
    @classmethod
    def _named(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(value))


PAPER = TrainSpec()
# here, so that naming the job does not import what computes it
register("icl-train", "esscher.icl.training.job:TRAIN")
