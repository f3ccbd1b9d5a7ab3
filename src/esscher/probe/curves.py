"""Error curves of a probe: from deposits, or from all keys where scores span more than a score
grid, to numbers of queries, to a curve, to rows of the table ``curves``, and back; and the numbers
of a head that are read off its curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from esscher.errors import grid as deposit
from esscher.errors.budget import tokens_needed
from esscher.errors.curve import ErrorCurve, QueryErrors, concatenate
from esscher.errors.grid import Deposit
from esscher.errors.integral import error_from_nodes
from esscher.errors.rate import fit_rate
from esscher.probe.spec import COMPARED, FIT, ProbeSpec, fit_points, fit_range
from esscher.probe.statistic import HeadView, Numbers
from esscher.runs.columns import Column
from esscher.tails.scores import SURVIVAL_AT

Indices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

METRIC = "l2"  # root mean square error of a head's outputs, in the table ``curves``
SAMPLING = "replacement"  # of the keys


@dataclass(frozen=True)
class AllKeys:
    """Scores (m, N) of all keys and their values (N, d_v), in place of deposits where the scores
    are wider than a grid; -inf for keys that a query does not see.
    """

    scores: Tensor
    values: Tensor

    @property
    def keys(self) -> Tensor:
        """(m,): how many each query sees."""
        return (self.scores > -torch.inf).sum(1)

    def errors(self, n: Indices) -> QueryErrors:
        """Of n keys drawn with replacement."""
        parts = []
        for row in self.scores:  # each query has keys of its own
            own = row > -torch.inf
            parts.append(error_from_nodes(row[own][None], None, self.values[own], None, n))
        return concatenate(parts)

    def statistics(self) -> dict[str, Floats]:
        """As esscher.tails.scores.score_statistics, from the scores themselves."""
        seen, count = self.scores > -torch.inf, self.keys
        apart = self.scores - self.scores.amax(1, keepdim=True)
        apart = apart - torch.where(seen, apart, 0.0).sum(1, keepdim=True) / count[:, None]
        sd = (torch.where(seen, apart, 0.0).square().sum(1) / count).sqrt()
        above = torch.stack([(apart > z * sd[:, None]).sum(1) / count for z in SURVIVAL_AT], 1)
        found = {"effective": 1 / self.scores.softmax(1).square().sum(1), "sd": sd}
        return {k: x.double().cpu().numpy() for k, x in (found | {"survival": above}).items()}


def no_keys(head: HeadView, queries: int) -> Deposit:
    """Score grids of some queries of a head before any key."""
    return deposit.init(queries, deposit.choose_grid(head.queries.dtype, SAMPLING), head.center)


def add_keys(
    state: Deposit | AllKeys, head: HeadView, keys: Callable[[HeadView], tuple[Tensor, Tensor]]
) -> Deposit | AllKeys:
    """The deposits after a block of keys, or all keys where they are held and the scores are too
    wide for a grid. ``keys``: scores and values of a view.
    """
    if isinstance(state, AllKeys):
        return state
    scores, values = keys(head)
    extent = deposit.reach(state, scores)
    if head.whole is not None and too_wide(extent):
        scores, values = keys(head.whole)
        return AllKeys(scores.double(), values)
    return deposit.update(state, scores, values, extent=extent, owned=True)


def too_wide(extent: deposit.Extent) -> bool:
    """Whether scores span more than a grid, or are not finite."""
    return extent.cells > deposit.MAX_CELLS or not extent.largest < deposit.FAR


# ---- curves

EFFECTIVE_TOKENS = Column(
    "effective_tokens",
    "float",
    "effective tokens",
    "One over the sum of squared weights: about how many keys a query attends to.",
    scale="log",
    first=12,
    short="effective",
)


def error_numbers(state: Deposit | AllKeys, n: Indices) -> dict[str, Tensor]:
    """Exact errors of each query at every n: n keys drawn with replacement."""
    found = state.errors(n) if isinstance(state, AllKeys) else deposit.finish(state, n, SAMPLING)
    names = ("mse", "sum_p2", "dmse_dlogn", "limit", "delta")
    numbers = {
        name: torch.from_numpy(np.array(getattr(found, name), dtype=np.float64)) for name in names
    }
    accuracy = torch.full((len(found.mse),), found.accuracy, dtype=torch.float64)
    return numbers | {"accuracy": accuracy, "keys": state.keys.cpu()}


def curve_of(found: Numbers, n: Indices) -> ErrorCurve:
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
    curve = ErrorCurve.from_queries(n, queries, kind="exact", origin=f"exact, {SAMPLING}")
    return replace(curve, metric=METRIC)


def curve_rows(curve: ErrorCurve) -> pd.DataFrame:
    """The rows of a curve, but for layer and head."""
    frame, empty = curve.to_frame(), np.full(curve.n.size, np.nan)
    frame["local_slope"] = empty if curve.slope is None else curve.slope
    frame["effective_tokens"] = empty if curve.effective_tokens is None else curve.effective_tokens
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
    log: bool
    near: float
    far: float
    n: int | None
    limits: tuple[float, float] = (0.0, math.inf)

    @property
    def low(self) -> str:
        return f"{self.key.removesuffix('_fit')}_low"

    @property
    def high(self) -> str:
        return f"{self.key.removesuffix('_fit')}_high"

    def plain(self, value: float) -> float:
        """From its scale to the number itself; NaN where there is no such end."""
        if not math.isfinite(value):
            return math.nan
        plain = math.exp(min(value, 700.0)) if self.log else value
        return min(max(plain, self.limits[0]), self.limits[1])


def headline_numbers(spec: ProbeSpec) -> tuple[Number, ...]:
    """Every number that has an interval, in the order of ``read_numbers``."""
    most = (spec.fit or FIT)[1]  # of a corpus: own contexts have no parts
    above, effective = (1.0, math.inf), (1.0, float(COMPARED))
    return (
        Number(f"relative_{COMPARED}", True, 0.1, 0.12, COMPARED),
        Number("beta_fit", False, 0.03, 0.04, most, (-math.inf, math.inf)),
        *(Number(needed_column(eps), True, 0.2, 0.2, None, above) for eps in spec.epsilons),
        Number(f"effective_{COMPARED}", True, 0.2, 0.2, COMPARED, effective),
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
