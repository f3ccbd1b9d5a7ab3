"""What ``esscher icl stability`` runs, as plain data."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from esscher.icl.spec import Covariances, Dim, Noise, OrderedLengths
from esscher.runs import RunSpec, register

__all__ = ["StabilitySpec"]


class StabilitySpec(RunSpec):
    """What ``esscher icl stability`` runs: flows of (O, V, K, Q) from the first weights of as many
    seeds.
    """

    job: Literal["icl-stability"] = "icl-stability"
    covariances: Covariances = ("isotropic", "kms:0.5")
    lengths: OrderedLengths = (10, 100, 1000)
    starts: int = Field(
        default=100,
        ge=1,
        le=10**6,
        description="how many first weights flow, as icl train --seeds draws them",
    )
    training: float = Field(
        default=1000.0,
        gt=0,
        le=1e9,
        description="time of training, twice rate times steps: who has not arrived then is stuck",
    )
    until: float = Field(
        default=1e5, gt=0, le=1e9, description="time at which a flow ends, to see who arrives later"
    )
    dim: Dim = 5
    noise: Noise = 0.1
    times: int = Field(default=100, ge=2, le=10**5, description="times at which a flow is recorded")
    block: int = Field(default=5, ge=1, le=10**6, description="starts in a unit of work")

    @model_validator(mode="after")
    def _ordered(self) -> StabilitySpec:
        if self.until < self.training:
            raise ValueError(
                f"until: expected a time of at least that of training, {self.training:g}, got"
                f" {self.until:g}"
            )
        return self


# here, so that naming the job does not import what computes it
register("icl-stability", "esscher.icl.stability.job:STABILITY")
