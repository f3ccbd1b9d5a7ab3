"""A claim from outside: one file. Half of the numbers drawn evenly between 0 and 1 are above
1/2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from esscher.papers.claim import Claim, Decision, EvidenceSpec
from esscher.papers.rules import inside, share_of


def measure(draws: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    return [{"above": int((rng.random(draws) > 0.5).sum()), "draws": draws}]


def decide(tables: Any) -> Decision:
    rows = tables["own"]["evidence"]
    found = share_of(int(rows["above"].sum()), int(rows["draws"].sum()))
    reason = f"{found.value:.3f} of the numbers"
    return Decision(inside(found, 0.4, 0.6), "share above 1/2", found, reason)


TAIL = Claim(
    id="o-100-half",
    source="this test",
    statement="Half of them are above 1/2.",
    hypothesis="Evenly drawn.",
    rule="Supported if the interval of the share lies between 0.4 and 0.6.",
    refuted_by="A share outside.",
    runs=lambda scale, seed: {
        "own": EvidenceSpec(
            claim="my_claim:TAIL",
            parts=({"draws": 2000}, {"draws": 2001 if scale == "full" else 2002}),
            seed=seed,
        )
    },
    decide=decide,
    measure=measure,
)
