"""How many keys each head keeps by the errors that a probe measured: the split of least predicted
error at the same total.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from esscher.models.downstream.cache import Budgets, Place
from esscher.models.downstream.context import DownstreamContext
from esscher.models.probe.rule_budget import rule_budget
from esscher.models.probe.run_budget import ALIKE, split_weights
from esscher.runs import load_run

__all__ = ["budget_hashes", "budgets_of"]


@functools.lru_cache(maxsize=1)
def budgets_of(source: DownstreamContext) -> Budgets:
    """By rule and size, the share of its cache that every key-value head keeps, for rules that the
    probe measured.
    """
    spec = source.spec
    if spec.budget is None:
        return {}
    run = load_run(Path(spec.budget))
    if "frontier" not in run.tables:
        raise ValueError(
            f"budget: {spec.budget} has no errors of keep rules; probe with --pool sequence and"
            " --rules"
        )
    frontier = run.table("frontier")
    weights, _ = split_weights(run, spec.weights)
    found: dict[str, dict[float, dict[Place, float]]] = {}
    caches = frontier.groupby(["layer", "kv_head"])["keys"].mean()
    wanted = {
        (layer, kv)
        for layer, shape in enumerate(source.loaded.shapes)
        for kv in range(shape.kv_heads)
    }
    if missing := sorted(wanted - set(caches.index)):
        raise ValueError(
            f"budget: {spec.budget} has no errors of key-value head"
            f" {missing[0][0]}.{missing[0][1]}; probe all layers"
        )
    for rule in spec.compared:
        if rule not in set(frontier["rule"]):
            continue
        for size in spec.sizes:
            total = round(spec.share(size, source.held) * float(caches.sum()))
            try:
                rows = rule_budget(frontier, rule, total=total, weights=weights).caches
            except ValueError:  # fewer keys than the probe's smallest sizes
                continue
            own = {
                (int(row.layer), int(row.kv_head)): float(row.ratio) for row in rows.itertuples()
            }
            found.setdefault(rule, {})[size] = own
    if not found:
        known = ", ".join(dict.fromkeys(frontier["rule"]))
        raise ValueError(
            f"budget: {spec.budget} measured {known}; expected one of {', '.join(spec.compared)}"
        )
    return found


def budget_hashes(source: DownstreamContext) -> dict[str, str]:
    """What the budget depends on."""
    if source.spec.budget is None:
        return {}
    budget, weights = Path(source.spec.budget), source.spec.weights
    files = {"budget": budget / "frontier.parquet"}
    if weights != ALIKE:
        files["weights"] = (
            budget / "heads.parquet" if weights is None else Path(weights) / "sensitivity.parquet"
        )
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
