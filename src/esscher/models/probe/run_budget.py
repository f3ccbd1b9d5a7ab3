"""The budget of a stored probe, from the tables that it has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from esscher.models.probe.budget_spec import ALLOWED
from esscher.models.probe.cache import Budget, budget_of
from esscher.models.probe.part import measured_part
from esscher.models.probe.rule_budget import (
    RuleBudget,
    Weights,
    find_rule,
    gradients_of,
    head_weights,
    random_frontier,
    rule_budget,
)
from esscher.runs import Run, load_run

__all__ = ["ALIKE", "run_budget", "split_weights"]

ALIKE = "none"  # weights: every head counts alike


def run_budget(
    run: Run,
    epsilon: Any = None,
    total: Any = None,
    rule: str | None = None,
    weights: str | None = None,
) -> Budget | RuleBudget:
    """Keys for a relative error, or the best split of a total, under a rule; random keys of a probe
    of the corpus.

    ``weights``: what heads count in a split, as of :func:`split_weights`.
    """
    if run.manifest.job != "probe":
        raise ValueError(
            f"{run.path}: expected a run of esscher probe, got one of {run.manifest.job}"
        )
    epsilon = ALLOWED if epsilon is None and total is None else epsilon
    several, part = "frontier" in run.tables, measured_part(run)
    counts, _ = split_weights(run, weights)
    if rule is None and not several:
        return replace(
            budget_of(run.table("heads"), run.table("curves"), epsilon, total), part=part
        )
    frontier = (
        run.table("frontier")
        if several
        else random_frontier(run.table("heads"), run.table("curves"))
    )
    found = rule_budget(
        frontier, find_rule(frontier, "random" if rule is None else rule), epsilon, total, counts
    )
    return replace(found, part=part)


def split_weights(run: Run, asked: str | None) -> tuple[Weights | None, str]:
    """What the errors of a probe's heads count in a split, None where alike; and that in words.

    ``asked``: None for the gradients of log p that the probe itself measured, where its model has
    next tokens; ALIKE; or a run of esscher downstream with the table sensitivity.
    """
    if asked == ALIKE:
        return None, "heads count alike"
    if asked is None:
        own = gradients_of(run.table("heads"))
        return (
            own,
            "heads count alike (no gradients in this run)"
            if own is None
            else "heads count by the gradient of log p",
        )
    stored = load_run(Path(asked))
    if "sensitivity" not in stored.tables:
        raise ValueError(
            f"weights: {asked} has no table sensitivity; run esscher downstream with --sensitivity"
        )
    return head_weights(stored.table("sensitivity")), f"heads count by the gradients of {asked}"
