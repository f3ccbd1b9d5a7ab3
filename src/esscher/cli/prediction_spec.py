"""What ``esscher predict`` is asked, as plain data: the fields of its YAML file, and its flags for the law."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from esscher.convergence.montecarlo.spec import Count, Dtype, HeadSpec, Ladder, Law, Seed, read_ladder
from esscher.runs.spec import Plain

__all__ = ["PredictSpec"]


class PredictSpec(Plain):
    """Everything ``esscher predict`` needs; a YAML file has these fields."""

    law: Law
    head: HeadSpec = HeadSpec()
    n: Ladder = Field(
        default_factory=lambda: read_ladder("10:1e12:12"),
        description="token numbers: 1e3:1e12, 1e3:1e12:40 or 100,1000",
    )
    queries: Count = Field(default=256, description="queries drawn where their law cannot be integrated")
    epsilon: Annotated[float, Field(gt=0)] = Field(default=0.1, description="relative error to find the tokens needed for")
    seed: Seed = 0
    dtype: Dtype = "float64"
