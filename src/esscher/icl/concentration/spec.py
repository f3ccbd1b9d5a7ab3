"""What ``esscher icl concentration`` runs, as plain data."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from esscher.icl.spec import Covariances, Dim, Noise, OrderedLengths, TaskCov
from esscher.runs import RunSpec, register

__all__ = ["ConcentrationSpec"]


class ConcentrationSpec(RunSpec):
    """What ``esscher icl concentration`` runs."""

    job: Literal["icl-concentration"] = "icl-concentration"
    covariances: Covariances = ("isotropic", "kms:0.5")
    lengths: OrderedLengths = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
    dim: Dim = 5
    noise: Noise = 0.1
    task_cov: TaskCov = "scaled"
    repeats: int = Field(
        default=32, ge=2, le=10**6, description="groups of prompts, resampled for the intervals"
    )
    prompts: int = Field(default=128, ge=1, le=1 << 20, description="prompts in a group")


# here, so that naming the job does not import what computes it
register("icl-concentration", "esscher.icl.concentration.job:CONCENTRATION")
