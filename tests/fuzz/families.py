"""The table of families: what is called, how often, against which reference."""

from __future__ import annotations

from tests.fuzz import (
    attention,
    budgets,
    calls,
    exact,
    heads,
    laws,
    limits,
    pools,
    query_laws,
    simulation,
    theory,
    wide_rules,
)
from tests.fuzz.driver import Family

__all__ = ["FAMILIES", "NOT_CALLED", "calls_of"]

FAMILIES = (
    Family("laws", 0.24, laws.COVERS, laws.one),
    Family("heads", 0.10, heads.COVERS, heads.one),
    Family("attention", 0.22, attention.COVERS, attention.one),
    Family("limits", 0.09, limits.COVERS, limits.one),
    Family("pool-curves", 0.09, pools.COVERS, pools.one),
    Family("exact-curves", 0.05, exact.COVERS, exact.one),
    Family("query-laws", 0.02, query_laws.COVERS, query_laws.one),
    Family("wide-rules", 0.02, wide_rules.COVERS, wide_rules.one),
    Family("attention-calls", 0.02, calls.COVERS, calls.one),
    Family("budgets", 0.10, budgets.COVERS, budgets.one),
    Family("theory", 0.045, theory.COVERS, theory.one),
    Family("simulation", 0.005, simulation.COVERS, simulation.one),
)

NOT_CALLED = {
    "capture": "needs a model",
    "compress": "needs a model",
    "describe": "needs a model",
    "budget": "needs a run; tests/cli/test_budget.py",
    "probe": "needs a model",
    "icl": "a part, not a function",
    "keep": "a part; tests/keep and tests/errors/test_keep_curve.py",
    "ConfidenceRegion": "a result of confidence_region",
    "Bounds": "numbers for confidence_region; tests/errors/test_region.py",
    "load_run": "needs a stored run",
    "Run": "needs a stored run",
}


def calls_of(family: Family, calls: int) -> int:
    """A family's part of all calls."""
    return max(1, round(family.share * calls))
