"""What ``esscher icl flow`` runs, as plain data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from esscher.icl.spec import Covariances, Dim, Noise, OrderedLengths
from esscher.runs import RunSpec, register

__all__ = ["FlowSpec"]


class FlowSpec(RunSpec):
    """What ``esscher icl flow`` runs. The flow starts where Theorem 5.2 of [S] does."""

    job: Literal["icl-flow"] = "icl-flow"
    covariances: Covariances = ("isotropic", "kms:0.5")
    lengths: OrderedLengths = (10, 30, 100, 300, 1000, 10_000, 100_000, 1_000_000)
    dim: Dim = 5
    noise: Noise = 0.1
    alpha: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="size of the first weights; by default half of Theorem 5.2's limit"
    )
    draws: int = Field(default=4000, ge=2, le=10**9, description="prompts that sample the best predictor's error")


register("icl-flow", "esscher.icl.flow.job:FLOW")  # here, so that naming the job does not import what computes it
