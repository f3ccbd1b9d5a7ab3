"""How much of a key-value cache a model needs: tokens of each head at a given error, and the best split of a total."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from esscher.convergence.budget import tokens_needed
from esscher.convergence.curve import ErrorCurve
from esscher.convergence.split import Shares, Sharing
from esscher.inputs import as_positive
from esscher.models.probe.curves import METRICS, stored_curves
from esscher.runs.columns import Column

__all__ = ["BUDGET", "Budget", "budget_of", "budget_table"]

BUDGET = (  # of budget_table
    Column("epsilon", "float", "relative error allowed", "Relative error that is allowed.", short="asked"),
    Column("rule", "word", "rule", "How tokens are shared between heads."),
    Column("tokens", "int", "tokens", "Number of tokens kept."),
    Column("ratio", "float", "share kept", "Share of the cache that is kept.", short="of the cache"),
    Column("saved", "float", "saved", "Share of the cache that is dropped."),
    Column(
        "squared_error",
        "float",
        "squared error",
        "Squared error summed over the heads, relative to their summed squared limits.",
    ),
)


@dataclass(frozen=True)
class Budget:
    """Tokens to keep for a relative error of ``epsilon``.

    ``heads``: a row per head (n_keys, tokens, ratio). ``caches``: a row per key-value head, whose heads share its keys: the
    most that one of them needs, and its share of the best split. ``totals``: a row per rule, with tokens, ratio, saved
    (share of the cache that goes) and squared_error (summed over heads, relative to the summed squared limits).
    """

    epsilon: float
    heads: pd.DataFrame
    caches: pd.DataFrame
    totals: pd.DataFrame


def budget_of(heads: pd.DataFrame, curves: pd.DataFrame, epsilon: Any, total: Any = None) -> Budget:
    """The budget at one error from the tables of a probe; with ``total`` that many tokens are split instead."""
    epsilon = as_positive(epsilon, "epsilon")
    if epsilon >= 1:
        raise ValueError(f"epsilon: expected a relative error between 0 and 1, got {epsilon:g}")
    # a head whose values are all alike has no error at any n: it needs no token, and there is nothing to compare
    known = {place: curve for place, curve in stored_curves(curves, METRICS["bernoulli"]).items() if curve.rms[0] > 0}
    if not known:
        raise ValueError("curves: no errors of kept keys in this run; were all of its heads refused?")
    kv_of = {(int(row.layer), int(row.head)): int(row.kv_head) for row in heads.itertuples()}
    per_head = pd.DataFrame([_head_row(place, kv_of[place], curve, epsilon) for place, curve in known.items()])
    groups = [(place, rows) for place, rows in per_head.groupby(["layer", "kv_head"], sort=True)]
    pools = [_together([known[int(layer), int(head)] for head in rows["head"]]) for (layer, _), rows in groups]
    caches = pd.DataFrame(
        [
            {"layer": layer, "kv_head": kv, "heads": len(rows), "n_keys": rows["n_keys"].max(), "tokens": rows["tokens"].max()}
            for (layer, kv), rows in groups
        ]
    )
    caches["ratio"] = caches["tokens"] / caches["n_keys"]
    totals, shares = _totals(pools, caches["tokens"].to_numpy(), epsilon, total)
    caches["best_split"] = shares.tokens
    return Budget(epsilon, per_head, caches, totals)


def budget_table(heads: pd.DataFrame, curves: pd.DataFrame, epsilons: Sequence[float]) -> pd.DataFrame:
    """budget.parquet: the totals at several errors."""
    return pd.concat([budget_of(heads, curves, epsilon).totals for epsilon in epsilons], ignore_index=True)


def _head_row(place: tuple[int, int], kv_head: int, curve: ErrorCurve, epsilon: float) -> dict[str, Any]:
    keys = int(curve.n[-1])
    tokens = tokens_needed(curve, epsilon)
    return {
        "layer": place[0],
        "head": place[1],
        "kv_head": kv_head,
        "n_keys": keys,
        "tokens": tokens,
        "ratio": tokens / keys,
    }


def _together(curves: list[ErrorCurve]) -> ErrorCurve:
    """The summed squared error of heads that share their keys."""
    rms = np.sqrt(sum(curve.rms**2 for curve in curves))
    scale = math.sqrt(sum(curve.scale**2 for curve in curves))
    return ErrorCurve(n=curves[0].n, rms=np.asarray(rms), kind="exact", metric=METRICS["bernoulli"], scale=scale)


def _totals(pools: list[ErrorCurve], own: Any, epsilon: float, total: Any) -> tuple[pd.DataFrame, Shares]:
    """Three rules: each cache what its own heads need, the same for all, and the best split.

    The last two take the fewest tokens with which the summed squared error is epsilon^2 of the summed squared limits; or,
    where a total is given, that total.
    """
    size = sum(curve.scale**2 for curve in pools)
    most = sum(int(curve.n[-1]) for curve in pools)
    sharing = Sharing(pools)
    if total is None:
        best = sharing.split(sharing.fewest(size * epsilon**2))
        even = sharing.split(sharing.fewest(size * epsilon**2, uniform=True))
    else:
        best = even = sharing.split(total)
    own_error = sharing.squared_error(own)
    rules = [
        ("each head its own", int(own.sum()), own_error),
        ("uniform", even.total, even.uniform_squared_error),
        ("best split", best.total, best.squared_error),
    ]
    rows = [
        {
            "epsilon": epsilon,
            "rule": rule,
            "tokens": tokens,
            "ratio": tokens / most,
            "saved": 1 - tokens / most,
            "squared_error": error / size,
        }
        for rule, tokens, error in rules
    ]
    return pd.DataFrame(rows), best
