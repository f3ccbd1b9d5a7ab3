"""predictions: every rate and bound for one head and one law of tokens, each with its source and
its standing.
"""

from __future__ import annotations

from typing import Any

import torch

from esscher.attention.head import Head
from esscher.measures.base import Measure
from esscher.theory import bohbot, boursier, keep_rules, sharp
from esscher.theory.prediction import Prediction, setting_of

THEORIES = (
    sharp.exponents,
    bohbot.moments,
    sharp.uniform,
    bohbot.hardmax,
    boursier.one_query,
    sharp.delta,
    boursier.averaged,
    boursier.gradients,
    keep_rules.predictions,
)


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
    return [prediction for theory in THEORIES for prediction in theory(setting)]
