"""ErrorCurve: the error of attention on n tokens against its limit, for a ladder of n. Every
estimator ends here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from esscher.runs.columns import Column
from esscher.runs.run import find_view

if TYPE_CHECKING:
    import pandas as pd

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class QueryErrors:
    """What an exact curve knows of each query; arrays run over (query, n) and then over output
    axes.
    """

    mse: Floats  # E||Gamma_n(x) - Gamma(x)||^2, (m, len n)
    sum_p2: Floats  # E sum_j p_j^2, (m, len n)
    limit: Floats  # Gamma(x), (m, d_v)
    delta: Floats  # lim n * MSE = tr C(x), (m,)
    bias: Floats | None = None  # E Gamma_n(x) - Gamma(x), (m, len n, d_v)
    dmse_dlogn: Floats | None = None  # derivative of mse, (m, len n)
    # E (Gamma_n - Gamma)(Gamma_n - Gamma)^T, (m, len n, d_v, d_v); its trace is mse
    second_moment: Floats | None = None
    # (m,) queries of one cluster are alike: a rate's interval resamples clusters
    clusters: npt.NDArray[np.int64] | None = None
    accuracy: float = 0.0  # relative error of sqrt(mse), rounding of the inputs apart
    nats: Floats | None = None  # 1/2 E e'F e, F the Fisher metric of the query's head, (m, len n)

    @property
    def cov(self) -> Floats | None:
        """Covariance of Gamma_n(x): ``second_moment`` minus bias bias^T, (m, len n, d_v, d_v)."""
        if self.second_moment is None or self.bias is None:
            return None
        return self.second_moment - self.bias[..., :, None] * self.bias[..., None, :]

    def take(self, rows: npt.NDArray[np.int64]) -> QueryErrors:
        """The errors of these queries, in this order."""
        known = {name: getattr(self, name) for name in (*AT_EACH_N, *OF_A_QUERY)}
        return replace(self, **{name: x[rows] for name, x in known.items() if x is not None})

    def at(self, place: int) -> QueryErrors:
        """The errors at one n."""
        known = {name: getattr(self, name) for name in AT_EACH_N}
        one = slice(place, place + 1)
        return replace(self, **{name: x[:, one] for name, x in known.items() if x is not None})


AT_EACH_N = ("mse", "sum_p2", "bias", "dmse_dlogn", "second_moment", "nats")
OF_A_QUERY = ("limit", "delta", "clusters")


def concatenate(parts: Sequence[QueryErrors]) -> QueryErrors:
    """Errors of disjoint groups of queries as one."""
    return _joined(parts, (*AT_EACH_N, *OF_A_QUERY), 0)


def side_by_side(parts: Sequence[QueryErrors]) -> QueryErrors:
    """Errors of the same queries at different n as one."""
    return _joined(parts, AT_EACH_N, 1)


def merged(first: npt.NDArray[np.bool_], inside: QueryErrors, outside: QueryErrors) -> QueryErrors:
    """Errors of all queries: ``inside`` of those that the mask marks, ``outside`` of the others."""
    rows = np.concatenate([np.flatnonzero(first), np.flatnonzero(~first)])
    return concatenate([inside, outside]).take(np.argsort(rows))


def _joined(parts: Sequence[QueryErrors], names: tuple[str, ...], axis: int) -> QueryErrors:
    columns = {name: [getattr(part, name) for part in parts] for name in names}
    known: dict[str, Any] = {
        name: None if any(x is None for x in column) else np.concatenate(column, axis)
        for name, column in columns.items()
    }
    return replace(parts[0], **known, accuracy=max(part.accuracy for part in parts))


def rms_stderr(squares: Floats) -> Floats:
    """Standard error of the root of the mean of independent squared errors (count, len n); NaN for
    a single one.
    """
    if len(squares) < 2:
        return np.full(squares.shape[1:], np.nan)
    spread, rms = squares.std(axis=0, ddof=1), np.sqrt(squares.mean(axis=0))
    # an error of exactly 0 has no relative spread
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(spread == 0, 0.0, spread / np.sqrt(len(squares)) / (2.0 * rms))


@dataclass(frozen=True, repr=False)
class ErrorCurve:
    """Root mean square error against the limit at each n.

    ``rms``: root of the mean over queries (or repeats) of the squared error; ``relative``: rms /
    ``scale``, where ``scale`` is the root mean square norm of the limit; ``stderr``: standard error
    of ``rms``, 0 where exact; ``query_stderr``: standard error of ``rms`` from drawing the queries
    of a law, 0 where they are given or their law is integrated; ``accuracy`` is the other error of
    an exact curve, that of the numbers at each query; ``kind``: "exact", "pool" (exact on a stated
    finite pool) or "montecarlo".
    """

    n: npt.NDArray[np.int64]
    rms: Floats
    kind: str
    metric: str = "l2"
    scale: float = float("nan")
    stderr: Floats = field(default_factory=lambda: np.zeros(0))
    query_stderr: Floats = field(default_factory=lambda: np.zeros(0))
    # of rms, from a drawn pool that stands for the law of the tokens
    pool_stderr: Floats | None = None
    # 95 % quantile over queries (exact) or repeats (Monte Carlo) of the error's norm
    q95: Floats | None = None
    slope: Floats | None = None  # d log rms / d log n at each n, analytic; None where unknown
    # 1 / E sum_j p_j^2, averaged over queries before inversion
    effective_tokens: Floats | None = None
    delta: float | None = None  # lim n * MSE, the delta method's constant
    accuracy: float = 0.0  # estimated relative error of rms from quadrature and rounding
    origin: str = ""  # one sentence: which formula, which pool, which sampling
    queries: QueryErrors | None = None
    kept: Floats | None = None  # keys kept on average over the queries, where a keep rule decides
    samples: Floats | None = None  # Monte Carlo: squared error of each repeat, (repeats, len n)

    def __post_init__(self) -> None:
        if self.stderr.size == 0:
            object.__setattr__(self, "stderr", np.zeros_like(self.rms))
        if self.query_stderr.size == 0:
            object.__setattr__(self, "query_stderr", np.zeros_like(self.rms))
        assert self.n.shape == self.rms.shape == self.stderr.shape == self.query_stderr.shape

    def __repr__(self) -> str:
        if self.n.size == 0:
            return f"ErrorCurve({self.metric}, {self.kind}, no n)"
        ends = [
            f"{self.rms[i]:.4g} at n = {self.n[i]}" for i in ((0, -1) if self.n.size > 1 else (0,))
        ]
        return f"ErrorCurve({self.metric}, {self.kind}: rms {' to '.join(ends)})"

    def plot(self, *, ax: Any = None) -> Any:
        """The error against n on logarithmic axes, with its 95 % quantile and standard errors;
        returns the matplotlib axes.
        """
        return find_view("plot_error")(self, ax=ax)

    @classmethod
    def from_queries(
        cls,
        n: npt.NDArray[np.int64],
        queries: QueryErrors,
        *,
        kind: str,
        origin: str,
        kept: Floats | None = None,
    ) -> ErrorCurve:
        """The curve over all queries alike, from each query's exact errors."""
        mse = queries.mse.mean(axis=0)
        if not np.isfinite(mse).all():
            raise ValueError(
                "values: their squared errors leave the floating range; scale the values down"
            )
        # an error of exactly 0 has no slope, and no key kept no weight
        with np.errstate(divide="ignore", invalid="ignore"):
            dmse = queries.dmse_dlogn
            slope = None if dmse is None else 0.5 * dmse.mean(axis=0) / mse
            effective = 1.0 / queries.sum_p2.mean(axis=0)
        delta = float(queries.delta.mean())
        largest = float(np.abs(queries.limit).max()) or 1.0
        return cls(
            n=n,
            rms=np.sqrt(mse),
            kind=kind,
            # by the largest entry, so that no square leaves the floating range
            scale=largest * float(np.sqrt(((queries.limit / largest) ** 2).sum(axis=1).mean())),
            q95=np.sqrt(np.quantile(queries.mse, 0.95, axis=0)),
            slope=slope,
            effective_tokens=effective,
            delta=None if np.isnan(delta) else delta,
            accuracy=queries.accuracy,
            origin=origin,
            queries=queries,
            kept=kept,
        )

    @classmethod
    def from_repeats(
        cls,
        n: npt.NDArray[np.int64],
        samples: Floats,
        *,
        metric: str = "l2",
        scale: float = float("nan"),
        origin: str = "",
        accuracy: float = 0.0,
    ) -> ErrorCurve:
        """The Monte Carlo curve of squared errors (repeats, len n); one repeat has no standard
        error.
        """
        return cls(
            n=n,
            rms=np.sqrt(samples.mean(axis=0)),
            kind="montecarlo",
            metric=metric,
            scale=scale,
            stderr=rms_stderr(samples),
            # the limit's own error may have been taken off
            q95=np.sqrt(np.quantile(samples, 0.95, axis=0).clip(min=0)),
            accuracy=accuracy,
            origin=origin,
            samples=samples,
        )

    @property
    def relative(self) -> Floats:
        """rms / scale: 0 where there is no error; infinite where there is one and the limit has
        size 0; NaN: scale unknown.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.where(self.rms == 0, 0.0, self.rms / np.float64(self.scale)))

    def ascending(self) -> ErrorCurve:
        """By increasing n, each n once, without samples and queries; ValueError where errors are no
        numbers of at least 0.
        """
        if self.n.size == 0:
            raise ValueError("curve: expected at least one n, got none")
        bad = ~(np.isfinite(self.rms) & (self.rms >= 0))
        if bad.any():
            raise ValueError(
                f"curve: expected finite errors of at least 0, got {self.rms[bad][0]} at n ="
                f" {self.n[bad][0]}; leave that n out or compute the error anew"
            )
        once = np.unique(self.n, return_index=True)[1]
        along: dict[str, Any] = {
            name: x[once]
            for name, x in vars(self).items()
            if isinstance(x, np.ndarray) and x.shape == self.n.shape
        }
        return replace(self, **along, samples=None, queries=None)

    def to_frame(self) -> pd.DataFrame:
        """Tidy table: metric kind n rms relative stderr q95."""
        import pandas as pd

        q95 = np.full_like(self.rms, np.nan) if self.q95 is None else self.q95
        return pd.DataFrame(
            {
                "metric": self.metric,
                "kind": self.kind,
                "n": self.n,
                "rms": self.rms,
                "relative": self.relative,
                "stderr": self.stderr,
                "q95": q95,
            }
        )


# ---- What the columns of stored error curves, rates and horizons are, whichever job stores them.

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
        "One-sided horizon: largest standard deviation of scores, for queries of norm one.",
        "log",
        first=10,
    ),
    Column(
        "horizon2",
        "float",
        "two-sided horizon",
        "Two-sided horizon: largest standard deviation of scores, for queries one standard"
        " deviation away from the mean.",
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


# ---- The two ways in which n keys come from a pool of N, by name.

# n keys drawn independently; each key kept with probability n / N
SAMPLINGS = ("replacement", "bernoulli")


def check_sampling(sampling: str, n: npt.NDArray[np.int64], keys: int) -> None:
    """Raise where this is no sampling, or where more keys are to be kept than there are."""
    if sampling not in SAMPLINGS:
        raise ValueError(
            f"sampling: expected {' or '.join(map(repr, SAMPLINGS))}, got {sampling!r}"
        )
    if sampling == "bernoulli" and n.max() > keys:
        raise ValueError(
            f"n: keeping keys of a pool of {keys} gives at most {keys} tokens, got {n.max()}"
        )
