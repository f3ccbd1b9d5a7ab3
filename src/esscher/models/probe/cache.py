"""How much of a key-value cache a model needs: tokens of each head at a given error, and the best
split of a total.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from esscher.convergence.budget import log_rms, tokens_needed
from esscher.convergence.curve import ErrorCurve
from esscher.convergence.split import Counts, Sharing
from esscher.inputs import as_count, as_positive
from esscher.models.probe.curves import METRICS, stored_curves
from esscher.models.probe.worst import WORST, worst_of
from esscher.runs.columns import Column

__all__ = [
    "BEST",
    "BUDGET",
    "OWN",
    "RATIO",
    "SAVED",
    "SHARE",
    "WANTED",
    "Budget",
    "budget_of",
    "budget_table",
    "described",
    "error_or_total",
    "shared",
]

OWN, UNIFORM, BEST = ("each head its own", "uniform", "best split")
WANTED = Column(
    "epsilon", "float", "relative error allowed", "Relative error that is allowed.", short="asked"
)
# what a percentage of the cache is, wherever one is shown
SHARE = (
    "Keys kept over keys that the cache holds, summed over layers and key-value heads; a"
    " sliding-window layer holds at most its window."
)
RATIO = Column("ratio", "float", "share of the cache kept", SHARE, short="of the cache")
SAVED = Column("saved", "float", "saved", "Share of the cache that is dropped: 1 - share kept.")
BUDGET = (  # of budget_table
    WANTED,
    Column("rule", "word", "split", "How tokens are shared between heads."),
    Column("tokens", "int", "tokens", "Number of tokens kept."),
    RATIO,
    SAVED,
    Column(
        "squared_error", "float", "squared error", "Squared relative error, mean over the heads."
    ),
    *WORST,
)


@dataclass(frozen=True, repr=False)
class Budget:
    """Tokens to keep, at random, for a relative error of ``epsilon``, or the best split of
    ``total``.

    ``heads``: a row per head (n_keys, tokens, ratio). ``caches``: a row per key-value head, whose
    heads share its keys: the most that one of them needs, and its share of the best split.
    ``totals``: a row per split, with tokens, ratio, saved (share of the cache that goes),
    squared_error (relative, mean over the heads: a head counts by its error relative to its own
    limit, whatever the size of that) and the head and the layer that it serves worst. Of a total
    the tokens are those of the best split. ``part``: of the model that was measured.
    """

    epsilon: float | None
    heads: pd.DataFrame
    caches: pd.DataFrame
    totals: pd.DataFrame
    part: str = ""

    def __repr__(self) -> str:
        return f"Budget({described(self.totals, 'rule', self.part)}; tables heads, caches, totals)"


def described(totals: pd.DataFrame, split: str, part: str) -> str:
    """Each split in a few words: what it keeps, and what it serves worst. ``split``: the column
    that names them.
    """
    told = [
        f"{row[split]} keeps {row['ratio']:.1%}, worst head {row['worst_head']} {row['worst']:.1%},"
        f" worst layer {row['worst_layer']} {row['worst_layer_error']:.1%}"
        for row in totals.to_dict("records")
    ]
    return "; ".join([*([part] if part else []), *told])


def error_or_total(epsilon: Any, total: Any) -> tuple[float | None, int | None]:
    """What a budget is asked for: one of the two, checked."""
    if (epsilon is None) == (total is None):
        raise ValueError(
            f"budget: expected an error or a total, got epsilon {epsilon} and total {total}"
        )
    if epsilon is None:
        return None, as_count(total, "total")
    epsilon = as_positive(epsilon, "epsilon")
    if epsilon >= 1:
        raise ValueError(f"epsilon: expected a relative error between 0 and 1, got {epsilon:g}")
    return epsilon, None


def budget_of(
    heads: pd.DataFrame, curves: pd.DataFrame, epsilon: Any = None, total: Any = None
) -> Budget:
    """The budget at one error, or of a total number of tokens, from the tables of a probe; keys are
    kept at random.
    """
    epsilon, total = error_or_total(epsilon, total)
    # a head whose values are all alike has no error at any n: it needs no token, and there is
    # nothing to compare
    known = {
        place: curve
        for place, curve in stored_curves(curves, METRICS["bernoulli"]).items()
        if curve.rms[0] > 0
    }
    if not known:
        raise ValueError(
            "curves: no errors of kept keys in this run; were all of its heads refused?"
        )
    kv_of = {(int(row.layer), int(row.head)): int(row.kv_head) for row in heads.itertuples()}
    per_head = pd.DataFrame(
        [
            {
                "layer": layer,
                "head": head,
                "kv_head": kv_of[layer, head],
                "n_keys": int(curve.n[-1]),
            }
            for (layer, head), curve in known.items()
        ]
    )
    groups = per_head.groupby(["layer", "kv_head"], sort=True)
    pools = [
        _together([known[int(layer), int(head)] for head in rows["head"]])
        for (layer, _), rows in groups
    ]
    caches = groups.agg(heads=("head", "size"), n_keys=("n_keys", "max")).reset_index()
    sharing, size = Sharing(pools), float(len(per_head))
    if epsilon is None:
        splits = shared(sharing, total=total)
        caches["tokens"] = splits[BEST]
        per_head["tokens"] = splits[BEST][groups.ngroup()]
    else:
        per_head["tokens"] = [tokens_needed(curve, epsilon) for curve in known.values()]
        caches["tokens"] = per_head["tokens"].groupby(groups.ngroup()).max()
        splits = {OWN: caches["tokens"].to_numpy(), **shared(sharing, size * epsilon**2)}
    for table in (per_head, caches):
        table["ratio"] = table["tokens"] / table["n_keys"]
    caches["best_split"] = splits[BEST]
    totals = _totals(sharing, size, epsilon, splits)
    worst = [
        _worst(known, dict(zip(known, tokens[groups.ngroup()].tolist(), strict=True)))
        for tokens in splits.values()
    ]
    return Budget(epsilon, per_head, caches, totals.join(pd.DataFrame(worst)))


def _worst(
    curves: Mapping[tuple[int, int], ErrorCurve], tokens: Mapping[tuple[int, int], int]
) -> dict[str, Any]:
    """The head and the layer that have the largest error, each head with the tokens of its
    cache.
    """
    heights = {
        place: float(log_rms(curve)(math.log(tokens[place]))) for place, curve in curves.items()
    }
    return worst_of(
        {place: (math.exp(2 * heights[place]), curve.scale**2) for place, curve in curves.items()}
    )


def budget_table(
    heads: pd.DataFrame, curves: pd.DataFrame, epsilons: Sequence[float]
) -> pd.DataFrame:
    """budget.parquet: the totals at several errors."""
    return pd.concat(
        [budget_of(heads, curves, epsilon).totals for epsilon in epsilons], ignore_index=True
    )


def _together(curves: list[ErrorCurve]) -> ErrorCurve:
    """The summed squared relative error of heads that share their keys."""
    rms = np.sqrt(sum(curve.relative**2 for curve in curves))
    scale = math.sqrt(len(curves))
    return ErrorCurve(
        n=curves[0].n, rms=np.asarray(rms), kind="exact", metric=METRICS["bernoulli"], scale=scale
    )


def shared(sharing: Sharing, target: float = math.nan, total: Any = None) -> dict[str, Counts]:
    """The same share for all and the best split: of a total, or of the fewest tokens with a summed
    squared error of ``target``.
    """
    even = sharing.split(sharing.fewest(target, uniform=True) if total is None else total)
    best = sharing.split(sharing.fewest(target)) if total is None else even
    return {UNIFORM: even.uniform, BEST: best.tokens}


def _totals(
    sharing: Sharing, size: float, epsilon: float | None, splits: dict[str, Counts]
) -> pd.DataFrame:
    most = int(sharing.most.sum())
    rows = [
        {
            "epsilon": math.nan if epsilon is None else epsilon,
            "rule": split,
            "tokens": int(tokens.sum()),
            "ratio": int(tokens.sum()) / most,
            "saved": 1 - int(tokens.sum()) / most,
            "squared_error": sharing.squared_error(tokens) / size,
        }
        for split, tokens in splits.items()
    ]
    return pd.DataFrame(rows)
