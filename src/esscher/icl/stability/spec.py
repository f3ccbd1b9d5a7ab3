"""What ``esscher icl stability`` runs, as plain data."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from esscher.icl.spec import Covariances, Dim, Noise, OrderedLengths
from esscher.runs import RunSpec, register

__all__ = ["StabilitySpec"]


class StabilitySpec(RunSpec):
    """What ``esscher icl stability`` runs: flows of (O, V, K, Q) from the first weights of as many seeds."""

    job: Literal["icl-stability"] = "icl-stability"
    covariances: Covariances = ("isotropic", "kms:0.5")
    lengths: OrderedLengths = (10, 100, 1000)
    starts: int = Field(default=100, ge=1, le=10**6, description="how many first weights flow, as icl train --seeds draws them")
    until: float = Field(
        default=1000.0, gt=0, le=1e9, description="time at which a flow ends; the paper's training is 1000, rate times steps twice"
    )
    dim: Dim = 5
    noise: Noise = 0.1
    times: int = Field(default=60, ge=2, le=10**5, description="times at which a flow is recorded")
    block: int = Field(default=5, ge=1, le=10**6, description="starts in a unit of work")


register("icl-stability", "esscher.icl.stability.job:STABILITY")  # here, so that naming the job does not import what computes it
