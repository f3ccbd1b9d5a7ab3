"""Whether the theory's hypotheses hold for a head, and which regime it is in: tails of tokens, of
scores and of weights.
"""

from esscher.tails.moments import TokenMoments, TokenSummary
from esscher.tails.regimes import HeadEvidence, Regime, classify, share_frozen
from esscher.tails.scores import (
    ScoreShape,
    SoftmaxStatistics,
    TailFit,
    TopScores,
    gaussian_khat,
    pareto_khat,
    score_histogram,
    softmax_statistics,
)

__all__ = [
    "HeadEvidence",
    "Regime",
    "ScoreShape",
    "SoftmaxStatistics",
    "TailFit",
    "TokenMoments",
    "TokenSummary",
    "TopScores",
    "classify",
    "gaussian_khat",
    "pareto_khat",
    "score_histogram",
    "share_frozen",
    "softmax_statistics",
]
