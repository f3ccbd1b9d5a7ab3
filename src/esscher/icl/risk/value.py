"""A risk with its error and its origin, its parts, and the lengths at which one is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from esscher.inputs import as_count

__all__ = ["CLOSED", "CUBATURE", "QUADRATURE", "SIMULATION", "Risk", "RiskParts", "as_length"]

CLOSED, QUADRATURE, CUBATURE, SIMULATION = "closed form", "quadrature", "cubature", "simulation"


@dataclass(frozen=True)
class Risk:
    """A risk, its error, and where it comes from.

    ``error`` is 0 for a closed form, a bound on the numerical error for a quadrature, one standard
    error for a cubature (over its random rotations) and for a simulation.
    """

    value: float
    error: float
    origin: str

    def __float__(self) -> float:
        return self.value


@dataclass(frozen=True)
class RiskParts:
    """risk = noise + approximation + bias + variance.

    noise: tau^2 / 2, which nobody avoids. approximation: what the layer misses with infinitely many
    tokens. bias: the change of the squared bias 1/2 E (E[prediction | w, x_q] - <w, x_q>)^2 from
    there to L tokens, which may be negative. variance: 1/2 E Var(prediction | w, x_q) on L tokens.
    """

    noise: float
    approximation: float
    bias: float
    variance: float

    @property
    def total(self) -> float:
        return self.noise + self.approximation + self.bias + self.variance


def as_length(length: Any) -> float | int:
    """A prompt length: a whole number of at least 1, or infinity."""
    if isinstance(length, float) and math.isinf(length) and length > 0:
        return math.inf
    return as_count(length, "length")
