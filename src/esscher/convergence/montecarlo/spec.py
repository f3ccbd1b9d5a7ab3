"""A head and a ladder of n written as plain data: what YAML files, flags and Python calls have in common."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, PositiveFloat, model_validator

from esscher.attention.head import Head
from esscher.inputs import as_counts
from esscher.measures.base import Measure
from esscher.runs.spec import Plain

__all__ = ["HeadSpec", "Seed", "parse_ladder"]

POINTS_PER_DECADE = 4
MOST_POINTS = 10_000  # of a ladder

Seed = Annotated[int, Field(ge=0, lt=2**63)]


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
