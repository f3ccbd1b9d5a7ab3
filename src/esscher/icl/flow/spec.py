"""What ``esscher icl flow`` runs, as plain data."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from esscher.icl.spec import Alpha, Covariances, Dim, Noise, OrderedLengths, QueryInside, TaskCov
from esscher.runs import RunSpec, register

__all__ = ["FlowSpec"]


class FlowSpec(RunSpec):
    """What ``esscher icl flow`` runs. The flow starts where Theorem 5.2 of [S] does."""

    job: Literal["icl-flow"] = "icl-flow"
    covariances: Covariances = ("isotropic", "kms:0.5")
    lengths: OrderedLengths = (10, 30, 100, 300, 1000, 10_000, 100_000, 1_000_000)
    dim: Dim = 5
    noise: Noise = 0.1
    task_cov: TaskCov = "scaled"
    alpha: Alpha = None
    query_inside: QueryInside = False
    trajectory: bool = Field(
        default=False,
        description="also the flows in time, with their distances and Lemma E.1's bound",
    )
    until: float = Field(default=100.0, gt=0, description="time at which the flows in time end")
    points: int = Field(default=24, ge=2, le=10**4, description="times at which they are recorded")
    draws: int = Field(
        default=4000, ge=2, le=10**9, description="prompts that sample the best predictor's error"
    )


# here, so that naming the job does not import what computes it
register("icl-flow", "esscher.icl.flow.job:FLOW")
