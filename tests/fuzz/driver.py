"""Run seeded calls, sort their outcomes, print the count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tests.fuzz.draw import Draw
from tests.fuzz.outcome import Finding, Refused

__all__ = ["Family", "Tally", "one_call", "run", "table"]

COLUMNS = ("calls", "refused", "checked", "wrong", "silent", "internal")


@dataclass(frozen=True)
class Family:
    """Calls of one kind: ``call`` draws inputs, calls the public API and checks against its
    reference.

    ``share``: of all calls. ``covers``: the names of ``es`` that its calls reach.
    """

    name: str
    share: float
    covers: tuple[str, ...]
    call: Callable[[Draw], None]


@dataclass
class Tally:
    """Outcomes of some calls; ``findings`` has the seed and index that make each again."""

    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    called: set[str] = field(default_factory=set)

    @property
    def bad(self) -> int:
        return self.counts["wrong"] + self.counts["silent"] + self.counts["internal"]

    def row(self, name: str) -> str:
        return f"{name:<16}" + "".join(f"{self.counts[column]:>10}" for column in COLUMNS)


def one_call(family: Family, seed: int, index: int) -> tuple[str, str, Draw]:
    """How the call ended ("refused", "checked", "wrong", "silent" or "internal"), the words, and
    what was drawn.
    """
    draw = Draw(seed, family.name, index)
    torch.manual_seed(index)
    try:
        family.call(draw)
    except Refused as refusal:
        if draw.junk is None and draw.extreme is None:
            return "wrong", f"refused without need: {refusal}", draw
        return "refused", str(refusal), draw
    except Finding as finding:
        if draw.junk is not None and finding.kind != "internal":
            return "wrong", f"junk was taken: {draw.junk}", draw
        return finding.kind, str(finding) + (f" [{draw.extreme}]" if draw.extreme else ""), draw
    if draw.junk is not None:
        return "wrong", f"junk was taken: {draw.junk}", draw
    assert draw.checks, f"{family.name}, seed {seed}, call {index}: nothing was checked"
    return "checked", "", draw


def run(family: Family, calls: int, seed: int) -> Tally:
    """The first ``calls`` calls of a family under this seed."""
    tally = Tally()
    for index in range(calls):
        outcome, words, draw = one_call(family, seed, index)
        tally.counts.update(["calls", outcome])
        tally.called |= draw.called
        if outcome in ("wrong", "silent", "internal"):
            again = f"python -m tests.fuzz --family {family.name} --seed {seed} --call {index}"
            tally.findings.append(f"{outcome}: {words}\n    {again}")
    return tally


def table(tallies: dict[str, Tally]) -> str:
    """One row a family, then their sum, then every finding with the command that makes it again."""
    total = Tally()
    for tally in tallies.values():
        total.counts.update(tally.counts)
    rows = [tally.row(name) for name, tally in tallies.items()]
    head = f"{'family':<16}" + "".join(f"{column:>10}" for column in COLUMNS)
    found = [finding for tally in tallies.values() for finding in tally.findings]
    return "\n".join([head, *rows, total.row("all"), *found])
