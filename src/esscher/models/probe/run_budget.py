"""The budget of a stored probe, from the tables that it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from esscher.models.probe.budget_spec import ALLOWED
from esscher.models.probe.cache import Budget, budget_of
from esscher.models.probe.part import measured_part
from esscher.models.probe.rule_budget import RuleBudget, find_rule, random_frontier, rule_budget
from esscher.runs import Run

__all__ = ["run_budget"]


def run_budget(run: Run, epsilon: Any = None, total: Any = None, rule: str | None = None) -> Budget | RuleBudget:
    """Keys for a relative error, or the best split of a total, under a rule; random keys of a probe of the corpus."""
    if run.manifest.job != "probe":
        raise ValueError(f"{run.path}: expected a run of esscher probe, got one of {run.manifest.job}")
    epsilon = ALLOWED if epsilon is None and total is None else epsilon
    several, part = "frontier" in run.tables, measured_part(run)
    if rule is None and not several:
        return replace(budget_of(run.table("heads"), run.table("curves"), epsilon, total), part=part)
    frontier = run.table("frontier") if several else random_frontier(run.table("heads"), run.table("curves"))
    found = rule_budget(frontier, find_rule(frontier, "random" if rule is None else rule), epsilon, total)
    return replace(found, part=part)
