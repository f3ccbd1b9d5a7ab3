"""What ``esscher predict`` is asked, as plain data: the fields of its YAML file, and its flags for
the law.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from esscher.errors.montecarlo.spec import Count, Dtype, HeadSpec, Ladder, Law, read_ladder
from esscher.runs.spec import Plain, Seed


class PredictSpec(Plain):
    """Everything ``esscher predict`` needs; a YAML file has these fields."""

    law: Law
    head: HeadSpec = HeadSpec()
    n: Ladder = Field(
        default_factory=lambda: read_ladder("10:1e12:12"),
        description="token numbers: 1e3:1e12, 1e3:1e12:40 or 100,1000",
    )
    queries: Count = Field(
        default=256, description="queries drawn where their law cannot be integrated"
    )
    epsilon: Annotated[float, Field(gt=0)] = Field(
        default=0.1, description="relative error to find the tokens needed for"
    )
    seed: Seed = 0
    dtype: Dtype = "float64"


class SettingFlags(Plain):
    """Flags that stand for fields of the law and of the head: the law's name, and fields whose name
    depends on the law.
    """

    gaussian: bool = Field(default=False, description="Gaussian tokens")
    sphere: bool = Field(default=False, description="tokens uniform on a sphere")
    ball: bool = Field(default=False, description="tokens uniform in a ball")
    cube: bool = Field(default=False, description="tokens uniform in a cube")
    rademacher: bool = Field(default=False, description="tokens with coordinates +-scale")
    laplace: bool = Field(default=False, description="tokens with Laplace coordinates")
    dim: int | None = Field(default=None, description="dimension of a token")
    size: float | None = Field(
        default=None,
        description="variance, radius, half width or scale of the law, whichever it has",
    )
    random_head: bool = Field(
        default=False, description="random W_q, W_k, W_v instead of A = V = I"
    )
