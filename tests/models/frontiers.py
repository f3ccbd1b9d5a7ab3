"""A made-up frontier whose errors are known in closed form, and a stored run that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from esscher.runs import Run
from tests.report.atlas import ProbeLike, store_run

__all__ = [
    *("CONSTANTS", "KEYS", "LIMIT"),
    *("frontier", "frontier_run", "one_head_a_layer", "probe_like"),
]

KEYS, LIMIT = 400.0, 3.0
SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6)
# constants of the relative error c sqrt(1/n - 1/N), by (layer, head); two heads share each of two
# key-value heads
CONSTANTS = {
    (0, 0): 1.0,
    (0, 1): 2.0,
    (0, 2): 4.0,
    (0, 3): 0.3,
    (1, 0): 1.0,
    (1, 1): 1.0,
    (1, 2): 6.0,
    (1, 3): 0.5,
}
FACTORS = {"random": 2.0, "sinks:4+recent": 1.0, "heavy": 0.5, "topk": 0.25, "neyman": 0.2}


FELT = (4.0, 0.25)  # by layer: nats of a squared relative error
WINDOWS = (0.5, 0.75, 1.75)  # the loss of each window over their mean


def frontier(factors: dict[str, float] | None = None, *, nats: bool = False) -> pd.DataFrame:
    """As a probe stores it: the 95 % quantile is twice the mean, and streams have no size below 2
    %. ``nats``: of a language model; heavy has scores, those of layer 1 a tenth of the others.
    """
    rows = []
    for rule, factor in (FACTORS if factors is None else factors).items():
        for (layer, head), constant in CONSTANTS.items():
            for share in SHARES:
                if rule == "sinks:4+recent" and share < 0.02:
                    continue
                kept = share * KEYS
                relative = factor * constant * np.sqrt(1 / kept - 1 / KEYS)
                rms = LIMIT * relative
                place = {
                    "layer": layer,
                    "head": head,
                    "kv_head": head // 2,
                    "rule": rule,
                    "share": share,
                    "kept": kept,
                }
                rows.append(
                    {
                        **place,
                        "keys": KEYS,
                        "rms": rms,
                        "relative": relative,
                        "q95": 2 * rms,
                        "accuracy": 0.0,
                    }
                )
                if nats:
                    loss = FELT[layer] * relative**2
                    windows = [loss * window for window in WINDOWS]
                    cut = 10.0**-layer / kept if rule == "heavy" else np.nan
                    rows[-1] |= {"nats": loss, "nats_windows": windows, "cut": cut}
    return pd.DataFrame(rows)


def one_head_a_layer(keys: dict[int, float], heads: int = 1) -> pd.DataFrame:
    """Errors c sqrt(1/n - 1/N) of layers whose windows hold different numbers N of keys, c = 1 +
    layer; one key-value head, read by some query heads.
    """
    rows = []
    for layer, held in keys.items():
        for share in SHARES:
            relative = (1 + layer) * np.sqrt(1 / (share * held) - 1 / held)
            row = {"layer": layer, "kv_head": 0, "rule": "keynorm", "share": share}
            row |= {"kept": share * held, "keys": held, "rms": relative, "relative": relative}
            rows += [row | {"q95": 2 * relative, "head": head} for head in range(heads)]
    return pd.DataFrame(rows)


def probe_like(path: Path, table: pd.DataFrame) -> Run:
    """A stored probe that has this frontier."""
    places = table[["layer", "head", "kv_head"]].drop_duplicates().to_dict("records")
    heads = [row | {"status": "ok", "reason": ""} for row in places]
    about = {
        "model": "example/windows",
        "layers": 3,
        "heads": 1,
        "kv_heads": 1,
        "text": "prose.txt",
    }
    tables = {"heads": heads, "frontier": table, "about": [about | {"window": 600, "tokens": 4096}]}
    return store_run(path, ProbeLike(), tables)


def frontier_run(
    path: Path,
    table: pd.DataFrame | None = None,
    **about: Any,
) -> Run:
    """A stored probe of two layers whose pool was the queries' own contexts."""
    heads: list[dict[str, Any]] = [
        {"layer": layer, "head": head, "kv_head": head // 2, "status": "ok", "reason": ""}
        for layer, head in CONSTANTS
    ]
    known = {
        "model": "example/two-layers",
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "text": "prose.txt",
        "window": 512,
        "tokens": 4096,
    }
    tables = {
        "heads": heads,
        "frontier": frontier() if table is None else table,
        "about": [{**known, **about}],
    }
    return store_run(path, ProbeLike(), tables)
