"""A claim as data: what is said and by whom, the experiment that tests it, and the rule that
decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import Field

from esscher.intervals import Interval
from esscher.papers.pictures import Picture
from esscher.runs import RunSpec, register

if TYPE_CHECKING:
    import pandas as pd

Scale = Literal["quick", "full"]
Verdict = Literal["supported", "refuted", "undecided"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
Rows = list[dict[str, Any]]
if TYPE_CHECKING:
    Tables = Mapping[str, Mapping[str, pd.DataFrame]]
else:
    Tables = Mapping
"""The stored tables of a claim's runs, by run and by name."""


@dataclass(frozen=True)
class Decision:
    """A verdict, the number it rests on (``effect`` names it, ``found`` has its interval), and
    why.
    """

    verdict: Verdict
    effect: str
    found: Interval
    reason: str
    picture: Picture | None = None


@dataclass(frozen=True)
class Claim:
    """One claim.

    ``id`` is paper, number and name, such as b-1-sub-parametric; numbers order claims. ``source``:
    paper and statement. ``statement``: the claim in our words. ``hypothesis``: under what it is
    made. ``rule``: how it is decided. ``refuted_by``: what would refute it. ``seen``: which of its
    own measurements had been looked at when rule or settings were fixed, so that a verdict at that
    seed is no blind test.

    ``runs`` gives the specs of the runs that test it, by name, at a scale and a seed; two claims
    with the same spec share its run. ``measure`` computes the rows of an :class:`EvidenceSpec`,
    where no other job does: it takes the settings of one part by name, and a generator ``rng``.
    ``decide`` reads the tables of the runs and nothing else. ``holds`` and ``fails`` make up tables
    in which the claim is true and false, to try the rule on (``esscher reproduce --check``).
    """

    id: str
    source: str
    statement: str
    hypothesis: str
    rule: str
    refuted_by: str
    runs: Callable[[Scale, int], Mapping[str, RunSpec]]
    decide: Callable[[Tables], Decision]
    holds: Callable[[int], Tables]
    fails: Callable[[int], Tables]
    measure: Callable[..., Rows] | None = None
    seen: str = ""

    @property
    def number(self) -> int:
        parts = self.id.split("-")
        if len(parts) < 3 or not parts[1].isdigit():
            raise ValueError(f"id: expected paper, number and name, as b-1-rate, got {self.id!r}")
        return int(parts[1])

    def described(self) -> dict[str, Any]:
        """The words of the claim, for JSON."""
        words = {
            "source": self.source,
            "statement": self.statement,
            "hypothesis": self.hypothesis,
            "rule": self.rule,
            "refuted_by": self.refuted_by,
            "seen": self.seen,
        }
        told = {name: " ".join(text.split()) for name, text in words.items()}
        return {"id": self.id, "number": self.number, **told}


class EvidenceSpec(RunSpec):
    """The parts of a claim's own measurement: each a mapping of settings, and a unit of work."""

    job: Literal["evidence"] = "evidence"
    claim: str
    parts: tuple[dict[str, Any], ...] = Field(min_length=1)


# here, so that naming it does not import what computes it
register("evidence", "esscher.papers.judge:EVIDENCE")
