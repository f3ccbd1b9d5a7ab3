"""A run of rows of evidence: for claims whose experiment is no other job's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from pydantic import Field

from esscher.reproduce.catalogue import check_known, find_claim
from esscher.runs import Job, RunSpec, Unit, register

__all__ = ["EVIDENCE", "EvidenceSpec"]


class EvidenceSpec(RunSpec):
    """The parts of a claim's own measurement: each a mapping of settings, and a unit of work."""

    job: Literal["evidence"] = "evidence"
    claim: str
    parts: tuple[dict[str, Any], ...] = Field(min_length=1)


def units(spec: EvidenceSpec) -> Iterator[Unit]:
    check_known(spec.claim)
    yield from ({"part": i, **settings} for i, settings in enumerate(spec.parts))


def compute(spec: EvidenceSpec, unit: Unit) -> dict[str, Any]:
    """The rows of one part, drawn from a seed of its own."""
    claim = find_claim(spec.claim)
    assert claim.measure is not None, f"claim {claim.id} measures nothing itself"
    settings = {name: value for name, value in unit.items() if name != "part"}
    rows = claim.measure(**settings, rng=np.random.default_rng([spec.seed, unit["part"]]))
    return {"evidence": [{"part": unit["part"], **row} for row in rows]}


EVIDENCE = Job("evidence", EvidenceSpec, units, compute)
register("evidence", "esscher.reproduce.evidence:EVIDENCE")
