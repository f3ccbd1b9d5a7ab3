"""A budget as others read it: a record of every key-value head (JSON, YAML), and the array of
kvpress's per-head press.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import yaml

from esscher.convergence.split import Sharing
from esscher.keep import parse
from esscher.keep.rule import Chance, Placed
from esscher.models.probe.rule_budget import RuleBudget, Weights, caches_of, per_query
from esscher.models.probe.worst import WORST

__all__ = ["KINDS", "as_bytes", "budget_record", "prune_ratios"]

KINDS = ("json", "yaml", "kvpress")


def budget_record(found: RuleBudget, about: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of every cache, with the error it leaves, and what that holds for."""
    split = "best split" if found.epsilon is None else "each head its own"
    (total,) = found.totals[found.totals["split"] == split].to_dict("records")
    kept = ("layer", "kv_head", "n_keys", "keys", "ratio", "error", "q95")
    return {
        **about,
        "rule": found.rule,
        "chosen": total["chosen"],
        "epsilon": found.epsilon,
        "total": found.total,
        "split": split,
        **{
            name: _plain(total[name])
            for name in ("keys", "ratio", "error", "q95", *(column.key for column in WORST))
        },
        "caches": [
            {name: _plain(row[name]) for name in kept} for row in found.caches.to_dict("records")
        ],
    }


def _plain(value: Any) -> Any:
    """Neither JSON nor kvpress knows NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_bytes(content: dict[str, Any] | npt.NDArray[np.float32], kind: str, ending: str) -> bytes:
    """The content of a file: an array is .npy where its name ends so, else nested lists."""
    if isinstance(content, np.ndarray) and ending == ".npy":
        file = io.BytesIO()
        np.save(file, content, allow_pickle=False)
        return file.getvalue()
    if isinstance(content, np.ndarray):
        return (json.dumps(content.astype(float).round(6).tolist()) + "\n").encode()
    text = (
        yaml.safe_dump(content, sort_keys=False)
        if kind == "yaml"
        else json.dumps(content, indent=2, allow_nan=False) + "\n"
    )
    return text.encode()


def prune_ratios(
    frontier: pd.DataFrame, rule: str, layers: int, kv_heads: int, weights: Weights | None = None
) -> npt.NDArray[np.float32]:
    """Shares to drop of each cache, (99, layers, kv_heads): row i is the best split that drops (i +
    1) % of the keys that all caches hold.

    Steepest first (:class:`esscher.convergence.split.Sharing`), so that no cache gets fewer keys
    where more are kept in all. Below the smallest size that was measured every cache shrinks in
    proportion.
    """
    if (reason := _not_a_press(rule)) is not None:
        raise ValueError(f"kvpress: {rule} {reason}; give another rule")
    caches = {(cache.layer, cache.kv_head): cache for cache in caches_of(frontier, rule, weights)}
    wanted = [(layer, kv) for layer in range(layers) for kv in range(kv_heads)]
    missing = [f"{layer}.{kv}" for layer, kv in wanted if (layer, kv) not in caches]
    if missing:
        measured = ", ".join(str(layer) for layer in sorted({layer for layer, _ in caches}))
        raise ValueError(
            f"kvpress: expected every key-value head of {layers} layers; this run has layers"
            f" {measured}, without {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}"
        )
    sharing = Sharing([caches[place].counted for place in wanted])
    least, most = int(sharing.least.sum()), int(sharing.most.sum())
    found = np.empty((99, len(wanted)))
    for percent in range(1, 100):
        total = round((100 - percent) / 100 * most)
        kept = (
            sharing.steepest_first(total)[0] if total >= least else sharing.least * (total / least)
        )
        found[percent - 1] = 1 - kept / sharing.most
    return found.reshape(99, layers, kv_heads).astype(np.float32)


def _not_a_press(rule: str) -> str | None:
    """Why no press of kvpress can follow a rule: it drops keys once, for all later queries, and the
    keys it keeps count as they are.
    """
    parts = parse(rule).parts
    if per_query(rule) or any(isinstance(part, Placed) and part.period > 1 for part in parts):
        return "chooses keys for each query, so that the cache holds all, and a press chooses once"
    if any(isinstance(part, Chance) and part.reweight for part in parts):
        return "gives kept keys weights of 1/p, and a press has no weights"
    return None
