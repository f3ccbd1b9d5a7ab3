"""A claim: what is said and by whom, the experiment that tests it, and the rule that decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from esscher.runs import RunSpec

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "VERDICTS",
    "Claim",
    "Decision",
    "Measured",
    "Picture",
    "Rows",
    "Scale",
    "Series",
    "Tables",
    "Verdict",
]

Scale = Literal["quick", "full"]
Verdict = Literal["supported", "refuted", "undecided"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
Rows = list[dict[str, Any]]
Values = Sequence[float] | npt.NDArray[np.float64]
Measured = Callable[..., Rows]
"""A measurement of a claim's own: the settings of one part and a seed by name, rows of evidence
out.
"""

if TYPE_CHECKING:
    Tables = Mapping[str, Mapping[str, pd.DataFrame]]
else:
    Tables = Mapping
"""What a claim is decided by: the stored tables of its runs, by run and name."""


@dataclass(frozen=True)
class Series:
    """Points of a picture, with their intervals where there are some; ``line`` joins them, as what
    theory gives is drawn.
    """

    label: str
    x: Values
    y: Values
    low: Values | None = None
    high: Values | None = None
    line: bool = False

    @classmethod
    def of(cls, label: str, x: Values, intervals: Iterable[tuple[float, float, float]]) -> Series:
        """Estimates with the ends of their intervals, one for each x."""
        y, low, high = np.array([*intervals], dtype=np.float64).T
        return cls(label, x, y, low, high)


@dataclass(frozen=True)
class Picture:
    """What a reader looks at: the evidence of a decision. ``log``: which axes are logarithmic, "",
    "x", "y" or "xy".
    """

    x: str
    y: str
    series: tuple[Series, ...]
    log: str = ""


@dataclass(frozen=True)
class Decision:
    """A verdict with the number it rests on: the ``effect`` is ``value``, between ``low`` and
    ``high``; and why.
    """

    verdict: Verdict
    effect: str
    value: float
    low: float
    high: float
    reason: str
    picture: Picture | None = None


@dataclass(frozen=True)
class Claim:
    """One claim.

    ``number`` orders claims. ``source``: paper and statement. ``statement``: in our words;
    ``hypothesis``: under what it is made. ``rule``: how it is decided; ``refuted_by``: what would
    refute it. ``runs`` gives the specs of the runs that test it, by name, at a scale and a seed;
    two claims that name one spec share its run. ``measure`` fills runs of
    :class:`~esscher.reproduce.EvidenceSpec`, where no other job does. ``decide`` reads the tables
    of the runs and nothing else. ``holds`` and ``fails`` make tables in which the claim is true and
    false: the rule is tried on them before it is believed (``esscher reproduce --check``).
    ``seen``: which measurements of its own had been looked at when rule or settings were fixed, so
    that a verdict at that seed is no blind test; empty where none had.
    """

    id: str
    number: int
    source: str
    statement: str
    hypothesis: str
    rule: str
    refuted_by: str
    runs: Callable[[Scale, int], Mapping[str, RunSpec]]
    decide: Callable[[Tables], Decision]
    holds: Callable[[int], Tables]
    fails: Callable[[int], Tables]
    measure: Measured | None = field(default=None, compare=False)
    seen: str = ""

    def described(self) -> dict[str, Any]:
        """What is said of it, as JSON holds it."""
        said = {
            "id": self.id,
            "number": self.number,
            "source": self.source,
            "statement": self.statement,
        }
        return said | {
            "hypothesis": self.hypothesis,
            "rule": self.rule,
            "refuted_by": self.refuted_by,
            "seen": self.seen,
        }
