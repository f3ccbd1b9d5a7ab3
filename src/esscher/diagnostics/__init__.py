"""Whether the theory's hypotheses hold for a head, and which regime it is in: tails of tokens, of
scores and of weights.
"""

from esscher.diagnostics.moments import TokenMoments, TokenSummary
from esscher.diagnostics.regimes import HeadEvidence, Regime, classify, share_frozen
from esscher.diagnostics.scores import (
    ScoreShape,
    SoftmaxStatistics,
    score_histogram,
    softmax_statistics,
)
from esscher.diagnostics.tails import TailFit, TopScores, gaussian_khat, pareto_khat

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
