"""A law, a head and a ladder of n written as plain data: what YAML files, flags and Python calls have in common."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import (
    Field,
    PositiveFloat,
    TypeAdapter,
    model_validator,
)

from esscher.attention.head import Head
from esscher.inputs import as_counts
from esscher.measures.ball import Ball
from esscher.measures.base import Measure
from esscher.measures.cube import Cube
from esscher.measures.gaussian import Gaussian
from esscher.measures.laplace import Laplace
from esscher.measures.mixture import Mixture
from esscher.measures.rademacher import Rademacher
from esscher.measures.sphere import Sphere
from esscher.measures.student import Student
from esscher.runs.spec import Plain

__all__ = ["HeadSpec", "LawSpec", "law_adapter", "parse_ladder"]

POINTS_PER_DECADE = 4
MOST_POINTS = 10_000  # of a ladder
MOST_DIM = 16_384  # a covariance of this size is 2 GB in float64

Dim = Annotated[int, Field(ge=1, le=MOST_DIM)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class GaussianSpec(Plain):
    """N(mean, Sigma): eigenvalues of Sigma fall like variance * i^-decay, or are given one by one in ``spectrum``."""

    law: Literal["gaussian"]
    dim: Dim
    variance: PositiveFloat = 1.0
    decay: float = Field(0.0, ge=0.0)
    spectrum: tuple[float, ...] | None = None
    mean: float | tuple[float, ...] = 0.0

    @model_validator(mode="after")
    def _lengths(self) -> GaussianSpec:
        for name in ("spectrum", "mean"):
            given = getattr(self, name)
            if isinstance(given, tuple) and len(given) != self.dim:
                raise ValueError(f"{name}: expected {self.dim} numbers, one per dimension, got {len(given)}")
        return self

    def build(self, dtype: torch.dtype, device: str) -> Measure:
        indices = torch.arange(1, self.dim + 1, dtype=torch.float64)
        values = self.variance * indices**-self.decay
        if self.spectrum is not None:
            values = torch.tensor(self.spectrum, dtype=torch.float64)
        mean = torch.full((self.dim,), self.mean) if isinstance(self.mean, float) else torch.tensor(self.mean)
        return Gaussian(torch.diag(values).to(device, dtype), mean.to(device, dtype))


class SphereSpec(Plain):
    law: Literal["sphere"]
    dim: Dim
    radius: PositiveFloat = 1.0

    def build(self, dtype: torch.dtype, device: str) -> Measure:
        return Sphere(self.dim, self.radius, dtype=dtype, device=device)


class BallSpec(Plain):
    law: Literal["ball"]
    dim: Dim
    radius: PositiveFloat = 1.0

    def build(self, dtype: torch.dtype, device: str) -> Measure:
        return Ball(self.dim, self.radius, dtype=dtype, device=device)


class CubeSpec(Plain):
    law: Literal["cube"]
    dim: Dim
    half_width: PositiveFloat = 1.0

    def build(self, dtype: torch.dtype, device: str) -> Measure:
        return Cube(self.dim, self.half_width, dtype=dtype, device=device)


class RademacherSpec(Plain):
    law: Literal["rademacher"]
    dim: Dim
    scale: PositiveFloat = 1.0

    def build(self, dtype: torch.dtype, device: str) -> Measure:
        return Rademacher(self.dim, self.scale, dtype=dtype, device=device)


class LaplaceSpec(Plain):
    law: Literal["laplace"]
    dim: Dim
    scale: PositiveFloat = 1.0

    def build(self, dtype: torch.dtype, device: str) -> Measure:
        return Laplace(self.dim, self.scale, dtype=dtype, device=device)


class StudentSpec(Plain):
    """Heavy tails: no limit exists, and the run says so."""

    law: Literal["student"]
    dim: Dim
    df: PositiveFloat
    scale: PositiveFloat = 1.0

    def build(self, dtype: torch.dtype, device: str) -> Measure:
        return Student(self.dim, self.df, self.scale, dtype=dtype, device=device)


class MixtureSpec(Plain):
    law: Literal["mixture"]
    weights: Annotated[tuple[float, ...], Field(min_length=1)]
    components: tuple[LawSpec, ...]

    @model_validator(mode="after")
    def _one_each(self) -> MixtureSpec:
        if len(self.weights) != len(self.components):
            raise ValueError(f"weights: expected {len(self.components)} numbers, one per component, got {len(self.weights)}")
        return self

    def build(self, dtype: torch.dtype, device: str) -> Measure:
        return Mixture(list(self.weights), [component.build(dtype, device) for component in self.components])


LawSpec = Annotated[
    GaussianSpec | SphereSpec | BallSpec | CubeSpec | RademacherSpec | LaplaceSpec | StudentSpec | MixtureSpec,
    Field(discriminator="law"),
]
MixtureSpec.model_rebuild()
law_adapter: TypeAdapter[Any] = TypeAdapter(LawSpec)


class HeadSpec(Plain):
    """A head for a given law: ``identity`` (A = V = I) or ``random`` (W_q, W_k, W_v ~ N(0, 1/d), k = d), then scaled.

    ``horizon`` sets the two-sided horizon for that law; ``scale`` multiplies the scores as they are. One of the two.
    """

    kind: Literal["identity", "random"] = "identity"
    horizon: PositiveFloat | None = None
    scale: PositiveFloat | None = None
    seed: Seed = 0

    @model_validator(mode="after")
    def _one_scaling(self) -> HeadSpec:
        if self.horizon is not None and self.scale is not None:
            raise ValueError("horizon and scale: expected one of the two, got both")
        return self

    def build(self, measure: Measure) -> Head:
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


def parse_ladder(text: Any) -> npt.NDArray[np.int64]:
    """Whole numbers from "1e3:1e12" (4 a decade), "1e3:1e12:40", "100,1000", a number or a list; increasing, each once."""
    if not isinstance(text, str):
        ladder = as_counts(text, "n")
    elif ":" in text:
        parts = text.split(":")
        if len(parts) not in (2, 3):
            raise ValueError(f"n: expected first:last or first:last:points, got {text!r}")
        first, last = as_counts([_number(part) for part in parts[:2]], "n")
        points = max(2, round(POINTS_PER_DECADE * math.log10(last / first)) + 1) if first < last else 1
        if len(parts) == 3:
            points = int(as_counts([_number(parts[2])], "n (points)")[0])
        if points > MOST_POINTS:
            raise ValueError(f"n: expected at most {MOST_POINTS} points, got {points}")
        ladder = np.unique(np.geomspace(float(first), float(last), points).round().astype(np.int64))
        if first > last:
            raise ValueError(f"n: expected first below last, got {text!r}")
    else:
        ladder = as_counts([_number(part) for part in text.split(",")], "n")
    if ladder.size > MOST_POINTS:
        raise ValueError(f"n: expected at most {MOST_POINTS} points, got {ladder.size}")
    if (np.diff(ladder) <= 0).any():
        raise ValueError(f"n: expected increasing numbers, got {ladder.tolist()}")
    return ladder


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as cause:
        raise ValueError(f"n: expected numbers such as 100,1000 or 1e3:1e12, got {text!r}") from cause
