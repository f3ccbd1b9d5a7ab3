"""What ``esscher icl risk`` and ``esscher icl length`` ask for."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from esscher.icl.spec import Alpha, Covariances, Dim, Noise, OrderedLengths, QueryInside, TaskCov
from esscher.runs.spec import Plain

__all__ = ["LengthFlags", "RiskFlags"]

Part = Annotated[float, Field(gt=0)]


class RiskFlags(Plain):
    """A task and the prompts on which a layer is judged."""

    covariances: Covariances = ("isotropic", "kms:0.5")
    lengths: OrderedLengths = (10, 100, 1000)
    dim: Dim = 5
    noise: Noise = 0.1
    task_cov: TaskCov = "scaled"
    query_inside: QueryInside = False
    query_covariance: str | None = Field(
        default=None, description="of the query, where it is not that of the prompt"
    )


class LengthFlags(Plain):
    """How close to the best risk the end of the flow is to come."""

    epsilon: tuple[Part, ...] = Field(
        default=(0.01,),
        min_length=1,
        description="excess risks, half mean squared errors, separated by commas",
    )
    covariances: Covariances = ("isotropic", "kms:0.5")
    dim: Dim = 5
    noise: Noise = 0.1
    task_cov: TaskCov = "scaled"
    alpha: Alpha = None
    query_inside: QueryInside = False
