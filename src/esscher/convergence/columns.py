"""What the columns of stored error curves, rates and horizons are, whichever job stores them."""

from __future__ import annotations

from esscher.runs.columns import Column

__all__ = ["CURVE", "HORIZONS", "RATE", "STATUS", "STDERR"]

STDERR = Column(
    "stderr", "float", "standard error", "Standard error of a sampled error; 0 where exact."
)
CURVE = (  # of ErrorCurve.to_frame
    Column(
        "metric",
        "word",
        "error of",
        "Which error: l2 the output itself, mean and cov its first two moments, uniform the worst"
        " query.",
        short="metric",
    ),
    Column("kind", "word", "kind", "exact (an integral) or montecarlo (sampled)."),
    Column("n", "int", "n", "Number of tokens; of kept keys, how many are kept on average.", "log"),
    Column("rms", "float", "rms error", "Root mean square error.", "log"),
    Column("relative", "float", "relative error", "Error divided by the size of the limit.", "log"),
    STDERR,
    Column("q95", "float", "95 % quantile", "Error that 95 % of the queries stay below.", "log"),
)
RATE = (  # of a RateFit
    Column(
        "exponent",
        "float",
        "measured exponent",
        "The error falls as n to minus this.",
        short="exponent",
        ends=("low", "high"),
    ),
    Column("low", "float", "low", "Lower end of the interval."),
    Column("high", "float", "high", "Upper end of the interval."),
    Column(
        "constant", "float", "constant", "The error is about this times n to minus the exponent."
    ),
    Column(
        "preferred_law",
        "word",
        "law",
        "Whether a power or a logarithm describes the decay better; empty where none is told.",
    ),
)
STATUS = (
    Column("status", "word", "status", "ok or exact; else what is wrong with the fit, or refused."),
    Column("reason", "word", "reason", "What the status means here, and what to do."),
)
HORIZONS = (
    Column(
        "horizon",
        "float",
        "horizon",
        "One-sided horizon: how far the score matrix stretches the tokens' spread.",
        "log",
        first=10,
    ),
    Column(
        "horizon2",
        "float",
        "two-sided horizon",
        "Horizon with the spread of queries and keys both counted: largest typical size of a"
        " score.",
        "log",
        first=11,
    ),
    Column(
        "coupling",
        "float",
        "coupling Ψ",
        "Attention-reach coupling: reach times the squared horizon. Large means slow convergence.",
        "log",
        first=9,
        short="coupling",
    ),
)
