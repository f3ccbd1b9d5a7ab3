"""predictions: every rate and bound for one head and one law of tokens, each with its source and
its standing.
"""

from __future__ import annotations

from typing import Any

import torch

from esscher.attention.head import Head
from esscher.measures.base import Measure
from esscher.theory import bohbot, delta_bound, hardmax, keep_rules, sharp, uniform
from esscher.theory.boursier import average, gradient, query, sums
from esscher.theory.prediction import Prediction
from esscher.theory.setting import setting_of

__all__ = ["predictions"]

THEORIES = (
    sharp,
    bohbot,
    uniform,
    hardmax,
    query,
    sums,
    delta_bound,
    average,
    gradient,
    keep_rules,
)  # each ends with its predictions


@torch.no_grad()
def predictions(
    head: Head, measure: Measure, *, queries_law: Measure | None = None, radius: Any = None
) -> list[Prediction]:
    """Every statement of theory about this head on tokens of this law; ``.applies`` says whether
    its hypotheses hold.

    ``queries_law``: law of the queries, by default that of the tokens (self-attention). ``radius``:
    the statements at one query hold for all queries |x| <= radius, by default the root mean square
    norm of a query. Statements whose hypotheses fail are kept, with the failing ones in ``.unmet``.
    Proved bounds lie above the exact error wherever they apply; heuristics carry that status and
    nothing else does.
    """
    setting = setting_of(head, measure, queries_law, radius)
    return [prediction for theory in THEORIES for prediction in theory.predictions(setting)]
