"""Prediction: one statement of theory about the error at n tokens, with its source, its hypotheses
and its standing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from esscher.inputs import as_counts

__all__ = ["Prediction", "Status", "Units"]

Floats = npt.NDArray[np.float64]
Conditions = tuple[tuple[str, bool | None], ...]

Status = Literal[
    "proved",
    "exact",
    "proved (asymptotic)",
    "heuristic",
    "experimental",
    "printed (not proved as printed)",
]
Units = Literal["rms", "mean absolute", "squared", "fourth power", "none"]

POWER: dict[str, float] = {"rms": 1.0, "mean absolute": 1.0, "squared": 0.5, "fourth power": 0.25}


@dataclass(frozen=True, repr=False)
class Prediction:
    """What one statement says of one head and one measure.

    ``status`` is one of

    - "proved": a bound with a complete proof, so the exact error lies below ``value`` wherever
      ``applies``;
    - "exact": an equality at every n;
    - "proved (asymptotic)": a proved statement about large n whose constant or remainder is not
      known here;
    - "heuristic": derived, not proved;
    - "experimental": a curve that experiments were compared with;
    - "printed (not proved as printed)": kept as its source prints it; its proof has a gap or the
      statement fails in a corner.

    ``value`` maps token numbers to float64 in ``units`` ("squared": the bound is on the squared
    error); it is infinite where the statement says nothing at that n, and None for a pure exponent.
    ``exponent`` is b where the root mean square error falls like n^-b. ``numbers`` holds what the
    formula was evaluated with.
    """

    name: str
    statement: str
    source: str
    formula: str
    status: Status
    quantity: str
    conditions: Conditions = ()
    exponent: float | None = None
    value: Callable[[Any], Floats] | None = None
    units: Units = "none"
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.status in get_args(Status)
        assert self.units in get_args(Units)
        assert (self.value is None) == (self.units == "none")
        if self.value is not None:
            object.__setattr__(self, "value", _quietly(self.value))

    def __repr__(self) -> str:
        applies = "applies" if self.applies else f"does not apply: {'; '.join(self.unmet)}"
        return f"Prediction({self.name}, {self.status}: {self.formula}; {applies})"

    @property
    def applies(self) -> bool:
        """All hypotheses hold. One that could not be checked (None) counts as not met."""
        return all(met is True for _, met in self.conditions)

    @property
    def unmet(self) -> tuple[str, ...]:
        """The hypotheses that fail or could not be checked."""
        return tuple(text for text, met in self.conditions if met is not True)

    def rms(self, n: Any) -> Floats:
        """``value`` turned into an error: its square or fourth root where it is a power of the
        error.
        """
        if self.value is None:
            raise ValueError(
                f"{self.name}: this prediction has an exponent and no value; read .exponent and"
                " .formula"
            )
        return np.asarray(self.value(as_counts(n, "n")) ** POWER[self.units], dtype=np.float64)


def _quietly(value: Callable[[Any], Floats]) -> Callable[[Any], Floats]:
    """The same numbers without numpy's warnings: a bound beyond float64 is infinite, and 0 times
    infinity says nothing.
    """

    @functools.wraps(value)
    def quiet(n: Any) -> Floats:
        with np.errstate(all="ignore"):
            return value(n)

    return quiet
