"""The columns of the table ``curves``, which several statistics fill."""

from __future__ import annotations

from dataclasses import replace

from esscher.convergence.columns import CURVE
from esscher.models.probe.curves import METRICS
from esscher.models.probe.statistics.identity import HEAD, LAYER
from esscher.models.probe.statistics.softmax import EFFECTIVE_TOKENS
from esscher.runs.columns import Column

__all__ = ["CURVES"]

METRIC = replace(
    CURVE[0],
    words=(*METRICS.values(), "mean", "cov"),
    meanings=(
        "exact, keys drawn with replacement",
        "exact, each key kept at random",
        "mean of the output",
        "covariance of the output",
    ),
)
CURVES = (
    LAYER,
    HEAD,
    *(METRIC if column.key == METRIC.key else column for column in CURVE),
    Column("local_slope", "float", "local slope", "Slope of log error against log n at this n."),
    EFFECTIVE_TOKENS,
    Column(
        "sampling",
        "word",
        "sampling",
        "How keys are drawn: with replacement, or each kept at random.",
    ),
)
