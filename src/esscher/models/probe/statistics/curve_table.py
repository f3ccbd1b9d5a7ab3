"""The columns of the table ``curves``, which several statistics fill."""

from __future__ import annotations

from esscher.models.probe.statistics.identity import HEAD, LAYER
from esscher.models.probe.statistics.softmax import EFFECTIVE_TOKENS
from esscher.runs.columns import Column

__all__ = ["CURVES"]

CURVES = (
    LAYER,
    HEAD,
    Column(
        "metric",
        "word",
        "error of",
        "Which error: l2 the output itself, mean and cov its first two moments, uniform the worst query.",
    ),
    Column("kind", "word", "kind", "exact (an integral) or montecarlo (sampled)."),
    Column("n", "int", "n", "Number of tokens; of kept keys, how many are kept on average."),
    Column("rms", "float", "rms error", "Root mean square error."),
    Column("relative", "float", "relative error", "Error divided by the size of the limit."),
    Column("stderr", "float", "standard error", "Standard error of a sampled error; 0 where exact."),
    Column("q95", "float", "95 % quantile", "Error that 95 % of the queries stay below."),
    Column("local_slope", "float", "local slope", "Slope of log error against log n at this n."),
    EFFECTIVE_TOKENS,
    Column("sampling", "word", "sampling", "How keys are drawn: with replacement, or each kept at random."),
)
