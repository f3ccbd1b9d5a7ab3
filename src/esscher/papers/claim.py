"""A claim as data: what is said and by whom, the experiment that tests it, and the rule that
decides. Words and numbers: claims.yaml; rules: the functions below ``@claim`` in claims_*.py.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd
import yaml
from pydantic import Field

from esscher.intervals import Interval
from esscher.runs import RunSpec, read_spec, register

Scale = Literal["quick", "full"]
Verdict = Literal["supported", "refuted", "undecided"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
Rows = list[dict[str, Any]]
Values = Sequence[float] | npt.NDArray[np.float64]
Tables = Mapping[str, Mapping[str, pd.DataFrame]]
"""The stored tables of a claim's runs, by run and by name."""


@dataclass(frozen=True)
class Series:
    """Points of a picture, with their intervals if they have any; ``line`` joins them."""

    label: str
    x: Values
    y: Values
    low: Values | None = None
    high: Values | None = None
    line: bool = False


@dataclass(frozen=True)
class Picture:
    """The evidence of a decision. ``log``: the logarithmic axes, "", "x", "y" or "xy"."""

    x: str
    y: str
    series: Sequence[Series]
    log: str = ""


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
    ``decide`` reads the tables of the runs and nothing else.
    """

    id: str
    source: str
    statement: str
    hypothesis: str
    rule: str
    refuted_by: str
    runs: Callable[[Scale, int], Mapping[str, RunSpec]]
    decide: Callable[[Tables], Decision]
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
        words = ("source", "statement", "hypothesis", "rule", "refuted_by", "seen")
        told = {name: " ".join(getattr(self, name).split()) for name in words}
        return {"id": self.id, "number": self.number, **told}


CLAIMS: dict[str, Claim] = {}
"""Claims of this package by id, added by :func:`claim`; those from outside by "module:NAME"."""


def claim(
    id: str, measure: Callable[..., Rows] | None = None
) -> Callable[[Callable[..., Decision]], Callable[..., Decision]]:
    """Make the function below the rule of the claim that ``claims.yaml`` has under this id.

    The file has its words, the ``thresholds`` of the rule (the words name them in braces, the
    function takes them by name), and its ``runs``.
    """
    known = _file()[id]
    thresholds: dict[str, Any] = known.get("thresholds", {})
    words = {
        name: text.format(**thresholds) for name, text in known.items() if isinstance(text, str)
    }

    def add(rule: Callable[..., Decision]) -> Callable[..., Decision]:
        runs, decide = partial(_runs, known["runs"]), partial(rule, **thresholds)
        CLAIMS[id] = Claim(id, runs=runs, decide=decide, measure=measure, **words)
        return rule

    return add


@functools.cache
def _file() -> dict[str, dict[str, Any]]:
    text = resources.files("esscher.papers").joinpath("claims.yaml").read_text("utf-8")
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return found


def _runs(runs: Any, scale: Scale, seed: int) -> dict[str, RunSpec]:
    """The specs of runs as ``claims.yaml`` has them. A list in a part of evidence stands for a part
    for each of its values.
    """
    for module in ("compress.spec", "errors.montecarlo.spec", "icl.specs", "probe.spec"):
        importlib.import_module(f"esscher.{module}")  # registers its jobs
    found: dict[str, RunSpec] = {}
    for name, fields in _at(scale, runs).items():
        if "parts" in fields:
            fields["parts"] = [part for each in fields["parts"] for part in _product(each)]
        # the seed of a stability run numbers its starts: no two seeds share some
        fields["seed"] = 1000 * (seed + 1) if fields["job"] == "icl-stability" else seed
        found[name] = read_spec(fields)
    return found


def _at(scale: Scale, value: Any) -> Any:
    """A copy of plain data with {quick: a, full: b} replaced by the one of this scale."""
    if isinstance(value, dict):
        if {*value} == {"quick", "full"}:
            return _at(scale, value[scale])
        return {key: _at(scale, one) for key, one in value.items()}
    return [_at(scale, one) for one in value] if isinstance(value, list) else value


def _product(settings: Mapping[str, Any]) -> Rows:
    lists = [value if isinstance(value, list) else [value] for value in settings.values()]
    return [dict(zip(settings, values, strict=True)) for values in itertools.product(*lists)]


class EvidenceSpec(RunSpec):
    """The parts of a claim's own measurement: each a mapping of settings, and a unit of work."""

    job: Literal["evidence"] = "evidence"
    claim: str
    parts: tuple[dict[str, Any], ...] = Field(min_length=1)


# here, so that naming it does not import what computes it
register("evidence", "esscher.papers.judge:EVIDENCE")
