"""Error curves of a probe: from deposits, or from all keys where scores span more than a score
grid, to numbers of queries, to a curve, to rows of the table ``curves``, and back; and the numbers
of a head that are read off its curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import pad

from esscher.errors import grid as deposit
from esscher.errors.budget import tokens_needed
from esscher.errors.curve import ErrorCurve, QueryErrors, concatenate, side_by_side
from esscher.errors.grid import Deposit, Grid
from esscher.errors.integral import error_from_nodes
from esscher.errors.keep_curve import KeepErrors
from esscher.errors.pool_curve import exact_pool_curve
from esscher.errors.rate import fit_rate
from esscher.hf.call import score
from esscher.keep.context import Context
from esscher.probe.spec import COMPARED, FIT, ProbeSpec, fit_points, fit_range
from esscher.probe.statistic import Numbers
from esscher.runs.columns import Column
from esscher.tails.scores import SoftmaxStatistics

Indices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

ELEMENTS = 2**22  # scores computed at once
METRICS = {"replacement": "l2", "bernoulli": "l2_kept"}  # of the errors of outputs, by sampling


@dataclass(frozen=True)
class AllKeys:
    """Queries (m, k) and all keys (N, k) and values (N, d_v) of a head; scores are ``factor`` times
    those of the model.

    ``sink``: a logit of each query that is in the softmax without a key. Draws take it for one more
    key of value 0; where keys are kept or dropped, it is always kept.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    bias: Tensor | None = None  # (m, N)
    seen: Tensor | None = None  # (m, N): which keys each query sees; None: all
    softcap: float | None = None
    sink: Tensor | None = None  # (m,)
    factor: float = 1.0

    @property
    def keys(self) -> Tensor:
        """(m,): how many each query sees."""
        if self.seen is not None:
            return self.seen.sum(1).cpu()
        return torch.full((len(self.q),), len(self.k), dtype=torch.int64)

    def only(self, rows: Tensor) -> AllKeys:
        """The same for some of the queries."""
        rows = rows.to(self.q.device)
        bias, seen, sink = (
            None if x is None else x[rows] for x in (self.bias, self.seen, self.sink)
        )
        return replace(self, q=self.q[rows], bias=bias, seen=seen, sink=sink)

    def errors(self, n: npt.NDArray[np.int64], sampling: str, of: int) -> QueryErrors:
        """Of n keys drawn with replacement, or of keys kept with probability n / of."""
        if self.bias is None and self.seen is None:
            scale = self.factor * self.scale
            found = exact_pool_curve(self.q, self.k, self.v, n, sampling, scale).queries
            assert found is not None
            return found
        if self.sink is not None and sampling == "bernoulli":
            return self._kept_beside_sink(n / of)
        parts, values = [], self._values
        for row in self.rows():  # each query has keys of its own
            own = row > -torch.inf
            found = error_from_nodes(
                row[own][None], None, values[own], None, n, sampling=sampling, of=of
            )
            parts.append(found)
        return concatenate(parts)

    def _kept_beside_sink(self, shares: npt.NDArray[np.float64]) -> QueryErrors:
        """Of keys kept with these probabilities; derivatives are not known."""
        assert self.seen is not None
        logits = torch.stack(list(replace(self, sink=None).rows())).masked_fill(~self.seen, 0.0)
        last = torch.full((len(self.q),), len(self.k) - 1, device=self.q.device)
        context = Context(
            self.q, self.k, self.v, self.scale, last, self.seen, logits, sink=self.sink
        )
        errors = KeepErrors(context)
        found = side_by_side([errors.share(min(1.0, share)) for share in shares.tolist()])
        limit = context.limit.cpu().numpy()
        return replace(found, limit=limit, dmse_dlogn=np.full_like(found.mse, np.nan))

    @property
    def _values(self) -> Tensor:
        """(N, d_v), or with that of a sink logit (N + 1, d_v)."""
        return self.v if self.sink is None else pad(self.v, (0, 0, 0, 1))

    def softmax(self) -> SoftmaxStatistics:
        """From the scores themselves, measured from each query's largest: no sum of them overflows
        or cancels.
        """
        parts = []
        for scores in self.scores():
            top = scores.amax(1, keepdim=True)
            seen = scores > -torch.inf
            below = torch.where(seen, scores - top, 0.0)
            log_sum = torch.where(seen, below, -torch.inf).logsumexp(1)
            p = torch.where(seen, (below - log_sum[:, None]).exp(), 0.0)
            entropy = (log_sum - (p * below).sum(1)).clamp_min(0)
            count = seen.sum(1)
            mean = below.sum(1) / count
            sd = (torch.where(seen, below - mean[:, None], 0.0).square().sum(1) / count).sqrt()
            parts.append((1 / p.square().sum(1), entropy, sd))
        columns = zip(*parts, strict=True)
        return SoftmaxStatistics(*(torch.cat(column).cpu().numpy() for column in columns))

    def masses(self, grid: Grid) -> Deposit:
        """Deposits of the keys without their values, of scores divided by a number that brings them
        onto the grid.
        """
        widest, span = 0.9 * deposit.MAX_CELLS * grid.spacing, 0.0
        for scores in self.scores():
            low = torch.where(scores > -torch.inf, scores, torch.inf).amin(1)
            span = max(span, float((scores.amax(1) - low).max()))
        unit = 2.0 ** max(0, math.ceil(math.log2(span / widest))) if span > 0 else 1.0
        parts = []
        for scores in self.scores():
            # measured from the mean, so that cell numbers are small
            state = deposit.init(len(scores), grid, torch.zeros(0, device=scores.device))
            seen = scores > -torch.inf
            mean = torch.where(seen, scores, 0.0).sum(1, keepdim=True) / seen.sum(1, keepdim=True)
            parts.append(deposit.update(state, (scores - mean) / unit, self._values[:, :0]))
        return deposit.stack(parts)

    def scores(self) -> Iterator[Tensor]:
        """In float64, some queries at a time; -inf for keys that a query does not see. A sink logit
        comes last.
        """
        every = torch.arange(len(self.q), device=self.q.device)
        for rows in torch.split(every, max(1, ELEMENTS // len(self.k))):
            some = self.only(rows)
            scores = score(
                some.q.double(), self.k.double(), self.scale, self.softcap, some.bias, some.seen
            )
            if some.sink is not None:
                scores = torch.cat([scores, some.sink[:, None]], 1)
            yield self.factor * scores

    def rows(self) -> Iterator[Tensor]:
        """The scores of one query after the other."""
        for scores in self.scores():
            yield from scores


def add_keys(
    state: Deposit | AllKeys, scores: Tensor, values: Tensor, pool: AllKeys | None
) -> Deposit | AllKeys:
    """The deposits after a block of keys, or all keys where they are held and the scores are too
    wide for a grid.
    """
    if isinstance(state, AllKeys):
        return state
    extent = deposit.reach(state, scores)
    if pool is not None and (extent.cells > deposit.MAX_CELLS or not extent.largest < deposit.FAR):
        return pool
    return deposit.update(state, scores, values, extent=extent, owned=True)


# ---- curves

EFFECTIVE_TOKENS = Column(
    "effective_tokens",
    "float",
    "effective tokens",
    "One over the summed squared weights: how many keys share the attention.",
    scale="log",
    first=12,
    short="effective",
)


def error_numbers(
    state: Deposit | AllKeys,
    n: Indices,
    sampling: str,
    of: int,
) -> dict[str, Tensor]:
    """Exact errors of each query at every n: n keys drawn with replacement, or keys kept with
    probability n / of.
    """
    if isinstance(state, AllKeys):
        found = state.errors(n, sampling, of)
    else:
        found = deposit.finish(state, n, sampling, of=of)
    names = ("mse", "sum_p2", "dmse_dlogn", "limit", "delta")
    numbers = {
        name: torch.from_numpy(np.array(getattr(found, name), dtype=np.float64)) for name in names
    }
    accuracy = torch.full((len(found.mse),), found.accuracy, dtype=torch.float64)
    return numbers | {"accuracy": accuracy, "keys": state.keys.cpu()}


def curve_of(found: Numbers, n: Indices, sampling: str) -> ErrorCurve:
    """The curve over all queries alike."""
    mse, sum_p2, limit, delta = (
        found[name].numpy() for name in ("mse", "sum_p2", "limit", "delta")
    )
    queries = QueryErrors(
        mse=mse,
        sum_p2=sum_p2,
        limit=limit,
        delta=delta,
        dmse_dlogn=found["dmse_dlogn"].numpy(),
        accuracy=float(found["accuracy"].max()),
    )
    curve = ErrorCurve.from_queries(n, queries, kind="exact", origin=f"exact, {sampling}")
    return replace(curve, metric=METRICS[sampling])


def curve_rows(curve: ErrorCurve) -> pd.DataFrame:
    """The rows of a curve, but for layer and head."""
    frame, empty = curve.to_frame(), np.full(curve.n.size, np.nan)
    frame["local_slope"] = empty if curve.slope is None else curve.slope
    frame["effective_tokens"] = empty if curve.effective_tokens is None else curve.effective_tokens
    frame["sampling"] = "bernoulli" if curve.metric == METRICS["bernoulli"] else "replacement"
    return frame


def stored_curves(curves: pd.DataFrame, metric: str) -> dict[tuple[int, int], ErrorCurve]:
    """The curves of one metric from the table ``curves``, by (layer, head)."""
    found = {}
    known = curves[curves["metric"] == metric].sort_values("n")
    for (layer, head), rows in known.groupby(["layer", "head"], sort=True):
        rms, relative, slope, stderr, q95 = (
            rows[name].to_numpy() for name in ("rms", "relative", "local_slope", "stderr", "q95")
        )
        found[int(layer), int(head)] = ErrorCurve(
            n=rows["n"].to_numpy().astype(np.int64),
            rms=rms,
            kind=str(rows["kind"].iloc[0]),
            metric=metric,
            scale=float(rms[0] / relative[0]) if relative[0] > 0 else math.nan,
            stderr=stderr,
            q95=q95,
            slope=slope if np.isfinite(slope).all() else None,
        )
    return found


def fitted(
    curve: ErrorCurve, fit: tuple[int, int], windows: Indices | None = None
) -> dict[str, float]:
    """The exponent over the half octaves of ``fit``, and its interval: over the ``windows`` (m,) of
    the queries, since queries of one window are alike; without them the range of local slopes.
    """
    places, queries = np.searchsorted(curve.n, fit_points(fit)), curve.queries
    if queries is not None:
        queries = replace(
            queries, mse=queries.mse[:, places], sum_p2=queries.sum_p2[:, places], clusters=windows
        )
    part = replace(
        curve,
        n=curve.n[places],
        rms=curve.rms[places],
        stderr=curve.stderr[places],
        query_stderr=np.zeros(0),
        slope=None if curve.slope is None else curve.slope[places],
        q95=None,
        queries=queries,
    )
    found = fit_rate(part, raise_on_failure=False)
    low, high = found.interval
    return {"beta_fit": found.exponent, "beta_low": low, "beta_high": high}


def pool_place(curve: ErrorCurve, keys: int) -> int:
    """Where the curve has as many keys as the pool, or the most below."""
    return int(np.flatnonzero(curve.n <= keys)[-1])


def at_error(name: str, epsilon: float) -> str:
    """What a column is called that there is one of for each relative error: name_10pct, and 2_5pct
    for 2.5 %.
    """
    return f"{name}_{percent(epsilon)}pct".replace(".", "_")


def needed_column(epsilon: float) -> str:
    return at_error("tokens_needed", epsilon)


def percent(epsilon: float) -> str:
    return f"{100 * epsilon:g}"


def or_nan(question: Callable[[ErrorCurve, float], int], curve: ErrorCurve, value: float) -> float:
    """What a curve answers, or NaN where it never gets there."""
    try:
        return float(question(curve, value))
    except ValueError:  # not reached within the ladder
        return math.nan


# ---- Numbers of a head that compare between pools, models and texts.


@dataclass(frozen=True)
class Number:
    """A number of a head, with an interval over more text.

    ``log``: it is compared by ratio. ``near`` and ``far``: as in esscher.errors.more_text, of its
    logarithm where it is. ``n``: where it is read off the curve, at most; None: at the number
    itself. ``limits``: no head can be outside.
    """

    key: str
    low: str
    high: str
    log: bool
    near: float
    far: float
    n: int | None
    limits: tuple[float, float] = (0.0, math.inf)

    def plain(self, value: float) -> float:
        """From its scale to the number itself; NaN where there is no such end."""
        if not math.isfinite(value):
            return math.nan
        plain = math.exp(min(value, 700.0)) if self.log else value
        return min(max(plain, self.limits[0]), self.limits[1])


def headline_numbers(spec: ProbeSpec) -> tuple[Number, ...]:
    """Every number that has an interval, in the order of ``read_numbers``."""

    def ratio(key: str, near: float, far: float, n: int | None, *limits: float) -> Number:
        low, high = limits or (0.0, math.inf)
        return Number(key, f"{key}_low", f"{key}_high", True, near, far, n, (low, high))

    most = (spec.fit or FIT)[1]  # of a corpus: own contexts have no parts
    no_limits = (-math.inf, math.inf)
    return (
        ratio(f"relative_{COMPARED}", 0.1, 0.12, COMPARED),
        Number("beta_fit", "beta_low", "beta_high", False, 0.03, 0.04, most, no_limits),
        *(ratio(needed_column(eps), 0.2, 0.2, None, 1.0, math.inf) for eps in spec.epsilons),
        ratio(f"effective_{COMPARED}", 0.2, 0.2, COMPARED, 1.0, float(COMPARED)),
    )


def read_numbers(
    spec: ProbeSpec, keys: int, n: Indices, mse: Floats, limit: Floats, sum_p2: Floats
) -> Floats:
    """The headline numbers of R curves, (R, k), each on its own scale; NaN where a curve does not
    have one.

    ``keys``: of the pool; ``n``: the ladder; ``mse`` and ``sum_p2`` (R, len n) and ``limit`` (R,),
    the squared norm of the limit: means over queries.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        height, x = 0.5 * np.log(mse / limit[:, None]), np.log(n.astype(float))
        fixed = int(np.searchsorted(n, COMPARED))
        points = np.searchsorted(n, fit_points(fit_range(spec, keys)))
        apart = x[points] - x[points].mean()
        slope = height[:, points] @ apart / (apart @ apart)
        needed = [_crossing(x, height, math.log(epsilon)) for epsilon in spec.epsilons]
        found = np.column_stack([height[:, fixed], -slope, *needed, -np.log(sum_p2[:, fixed])])
    return np.where(np.isfinite(found), found, np.nan)


def _crossing(x: Floats, height: Floats, level: float) -> Floats:
    """Where each row first falls to the level, by straight lines between the points; NaN where it
    does not.
    """
    below = height <= level
    first = np.maximum(below.argmax(axis=1), 1)
    rows = np.arange(len(height))
    left, right = height[rows, first - 1], height[rows, first]
    share = np.clip((left - level) / (left - right), 0.0, 1.0)
    crossing = x[first - 1] + share * (x[first] - x[first - 1])
    return np.where(below[:, 0], x[0], np.where(below.any(axis=1), crossing, np.nan))


def headline(curve: ErrorCurve, spec: ProbeSpec, keys: int) -> dict[str, float]:
    """The headline numbers of an exact curve of draws with replacement; ``keys``: of the pool."""
    place = int(np.searchsorted(curve.n, COMPARED))
    effective = curve.effective_tokens
    return {
        "beta_fit": fitted(curve, fit_range(spec, keys))["beta_fit"],
        f"relative_{COMPARED}": float(curve.relative[place]),
        f"effective_{COMPARED}": math.nan if effective is None else float(effective[place]),
        **{needed_column(eps): or_nan(tokens_needed, curve, eps) for eps in spec.epsilons},
    }
