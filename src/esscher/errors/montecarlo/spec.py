"""What ``esscher converge`` runs, as plain data: what YAML files, flags and Python calls have in
common.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    SerializeAsAny,
    field_validator,
    model_validator,
)

from esscher.runs import RunSpec, register
from esscher.runs.spec import Plain, Seed


def read_ladder(value: Any, name: str = "n") -> tuple[int, ...]:
    # help and flags do not wait for torch
    from esscher.inputs import parse_ladder

    return tuple(parse_ladder(value, name).tolist())


def _read_law(value: Any) -> Any:
    from esscher.measures.fields import read_law

    return read_law(value)


Ladder = Annotated[tuple[int, ...], BeforeValidator(lambda value: read_ladder(value))]
Count = Annotated[int, Field(ge=1, le=1 << 20)]
Dtype = Annotated[
    Literal["float32", "float64"], Field(description="floating point: float32 or float64")
]
if TYPE_CHECKING:
    from esscher.attention.head import Head
    from esscher.measures.base import Measure
    from esscher.measures.fields import LawSpec

    Law = LawSpec
else:  # read with the laws, which are imported when the first one is
    Law = Annotated[SerializeAsAny[Plain], BeforeValidator(_read_law)]


class HeadSpec(Plain):
    """A head for a given law: ``identity`` (A = V = I) or ``random`` (W_q, W_k, W_v ~ N(0, 1/d), k
    = d), then scaled.

    ``horizon`` sets the two-sided horizon for that law; ``scale`` multiplies the scores as they
    are. One of the two.
    """

    kind: Literal["identity", "random"] = "identity"
    horizon: PositiveFloat | None = Field(
        default=None, description="two-sided horizon the head is scaled to"
    )
    scale: PositiveFloat | None = Field(
        default=None, description="factor on the head's scores, instead of a horizon"
    )
    seed: Seed = 0

    @model_validator(mode="after")
    def _one_scaling(self) -> HeadSpec:
        if self.horizon is not None and self.scale is not None:
            raise ValueError("horizon and scale: expected one of the two, got both")
        return self

    def build(self, measure: Measure) -> Head:
        """The head in the law's dimension, scaled."""
        import torch

        from esscher.attention.head import Head

        d = measure.dim
        if self.kind == "identity":
            eye = torch.eye(d, dtype=torch.float64, device=measure.device)
            head = Head(eye, eye)
        else:
            generator = torch.Generator().manual_seed(self.seed)
            weights = torch.randn(3, d, d, dtype=torch.float64, generator=generator) / math.sqrt(d)
            head = Head.from_weights(*weights.to(measure.device))
        if self.horizon is not None:
            return head.scaled(self.horizon / head.horizon(measure))
        return head if self.scale is None else head.scaled(self.scale)


class Sweep(Plain):
    """The number that changes from point to point: the head's horizon or scale, the ball's radius,
    or the spectrum's decay.
    """

    over: Literal["horizon", "scale", "radius", "decay"]
    values: tuple[float, ...] = Field(
        min_length=1, max_length=1000, description="values of the sweep, separated by commas"
    )

    @model_validator(mode="after")
    def _usable(self) -> Sweep:
        smallest = min(self.values)
        if smallest < 0 or (smallest == 0 and self.over != "decay"):
            raise ValueError(f"values: expected numbers above 0 for {self.over}, got {smallest:g}")
        return self


class ExperimentSpec(RunSpec):
    """What ``esscher converge`` runs; presets are files of these fields."""

    job: Literal["converge"] = "converge"
    title: str = ""
    law: Law
    head: HeadSpec = HeadSpec()
    sweep: Sweep | None = None
    n: Ladder = Field(description="numbers of tokens: 1e3:3e4:12 or 100,1000")
    repeats: int = Field(default=100, ge=2, le=1_000_000, description="draws of the tokens")
    metrics: tuple[str, ...] = Field(
        default=("mean", "cov", "l2"), description="errors to measure, e.g. mean,cov,l2,uniform"
    )
    sampling: Literal["nested", "independent"] = Field(
        default="nested", description="sampling of the tokens: nested or independent"
    )
    query_inside: bool = Field(
        default=False, description="put the query's own token into its prompt"
    )
    queries: Count = 64
    radius: Annotated[float, Field(gt=0)] | None = None
    dtype: Literal["auto", "float32", "float64"] = Field(
        default="auto",
        description="floating point: float32, float64, or auto, the one the error needs",
    )

    @field_validator("metrics")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        from esscher.errors.montecarlo.converge import METRICS

        unknown = [name for name in value if name not in METRICS]
        if unknown or not value:
            raise ValueError(
                f"expected some of {', '.join(METRICS)}, got {', '.join(unknown) or 'none'}"
            )
        return tuple(dict.fromkeys(value))

    @property
    def points(self) -> tuple[float, ...]:
        return (float("nan"),) if self.sweep is None else self.sweep.values


# here, so that naming the job does not import what computes it
register("converge", "esscher.errors.montecarlo.job:CONVERGE")
