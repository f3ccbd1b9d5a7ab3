"""Error curves of a probe: from deposits to the errors of queries, to a curve, to rows of the table
``curves``, and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from esscher.errors import grid as deposit
from esscher.errors.budget import tokens_needed
from esscher.errors.curve import ErrorCurve, QueryErrors
from esscher.errors.grid import Deposit
from esscher.errors.more_text import BEYOND, SETTLED
from esscher.errors.rate import fit_rate
from esscher.probe.spec import FIT, FIXED, ProbeSpec, fit_points, fit_range
from esscher.probe.wide import Held

Counts = npt.NDArray[np.int64]

METRICS = {"replacement": "l2", "bernoulli": "l2_kept"}  # of the errors of outputs, by sampling


@dataclass(frozen=True)
class Errors:
    """The exact errors of m queries at every n of a ladder: all that is left of their keys."""

    mse: Tensor  # (m, len n)
    sum_p2: Tensor  # (m, len n)
    dmse_dlogn: Tensor  # (m, len n)
    limit: Tensor  # (m, d_v)
    delta: Tensor  # (m,)
    accuracy: Tensor  # (m,)
    keys: Tensor  # (m,): that each query saw

    @classmethod
    def of(cls, found: QueryErrors, keys: Tensor) -> Errors:
        names = ("mse", "sum_p2", "dmse_dlogn", "limit", "delta")
        numbers = {
            name: torch.from_numpy(np.array(getattr(found, name), dtype=np.float64))
            for name in names
        }
        return cls(
            **numbers,
            accuracy=torch.full((len(keys),), found.accuracy, dtype=torch.float64),
            keys=keys.cpu(),
        )

    @classmethod
    def none(cls, width: int, ladder: int) -> Errors:
        """Of no query."""
        shapes = {
            "mse": (0, ladder),
            "sum_p2": (0, ladder),
            "dmse_dlogn": (0, ladder),
            "limit": (0, width),
        }
        numbers = {
            part.name: torch.zeros(shapes.get(part.name, (0,)), dtype=torch.float64)
            for part in fields(cls)
        }
        return cls(**{**numbers, "keys": torch.zeros(0, dtype=torch.int64)})

    @property
    def mean_keys(self) -> int:
        """The number of keys that a query saw, on average, to the nearest whole number."""
        return round(float(self.keys.double().mean()))

    def curve(self, n: Counts, sampling: str) -> ErrorCurve:
        """Over all queries alike."""
        mse, sum_p2, slope, limit, delta = (
            x.numpy() for x in (self.mse, self.sum_p2, self.dmse_dlogn, self.limit, self.delta)
        )
        queries = QueryErrors(
            mse=mse,
            sum_p2=sum_p2,
            limit=limit,
            delta=delta,
            dmse_dlogn=slope,
            accuracy=float(self.accuracy.max()),
        )
        curve = ErrorCurve.from_queries(n, queries, kind="exact", origin=f"exact, {sampling}")
        return replace(curve, metric=METRICS[sampling])


def errors_of(
    state: Deposit | Held, n: Counts, sampling: str, of: int, notes: dict[str, Any]
) -> Errors:
    """The exact error of n keys drawn with replacement, or of keys kept with probability n / of.

    The error of the score grids is measured on the first head of a layer, and noted for the others.
    """
    if isinstance(state, Held):
        return Errors.of(state.errors(n, sampling, of), state.keys)
    found = deposit.finish(state, n, sampling, of=of, interpolation=notes.get("interpolation"))
    notes.setdefault("interpolation", found.interpolation)
    return Errors.of(found, state.keys)


def curve_rows(curve: ErrorCurve) -> pd.DataFrame:
    """The rows of a curve, but for layer and head."""
    frame = curve.to_frame()
    empty = np.full(curve.n.size, np.nan)
    frame["local_slope"] = empty if curve.slope is None else curve.slope
    frame["effective_tokens"] = empty if curve.effective_tokens is None else curve.effective_tokens
    frame["sampling"] = "bernoulli" if curve.metric == METRICS["bernoulli"] else "replacement"
    return frame


def stored_curves(curves: pd.DataFrame, metric: str) -> dict[tuple[int, int], ErrorCurve]:
    """The curves of one metric from the table ``curves`` of a probe, by (layer, head); empty where
    it was not measured.
    """
    found = {}
    for (layer, head), rows in curves[curves["metric"] == metric].groupby(
        ["layer", "head"], sort=True
    ):
        rows = rows.sort_values("n")
        rms, relative = rows["rms"].to_numpy(), rows["relative"].to_numpy()
        slope = rows["local_slope"].to_numpy()
        found[int(layer), int(head)] = ErrorCurve(
            n=rows["n"].to_numpy().astype(np.int64),
            rms=rms,
            kind=str(rows["kind"].iloc[0]),
            metric=metric,
            scale=float(rms[0] / relative[0]) if relative[0] > 0 else math.nan,
            stderr=rows["stderr"].to_numpy(),
            q95=rows["q95"].to_numpy(),
            slope=slope if np.isfinite(slope).all() else None,
        )
    return found


# ---- The numbers of a head that compare between pools, models and texts: all from its error
# curve, at n that are always the same.

Indices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Number:
    """A headline number: its column, and its scale.

    ``log``: it is compared by ratio. ``near`` and ``far``: as in esscher.errors.more_text, of
    its logarithm where it is. ``n``: where it is read off the curve, at most; None where that is
    the number itself. ``limits``: no head can be outside.
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
        """From its scale to the number itself, within what is possible; NaN where there is no such
        end.
        """
        if not math.isfinite(value):
            return math.nan
        plain = math.exp(min(value, 700.0)) if self.log else value
        return min(max(plain, self.limits[0]), self.limits[1])


def headline_numbers(spec: ProbeSpec) -> tuple[Number, ...]:
    """Every number that has an interval for an endless text, in the order of ``read_numbers``."""
    tokens = {"log": True, "near": 0.2, "far": 0.2}
    return (
        *(_number(f"relative_{n}", log=True, near=0.1, far=0.12, n=n) for n in FIXED),
        Number(
            "beta_fit",
            "beta_low",
            "beta_high",
            log=False,
            near=0.03,
            far=0.04,
            n=(spec.fit or FIT)[1],  # of a corpus: own contexts have no parts
            limits=(-math.inf, math.inf),
        ),
        *(
            _number(needed_column(epsilon), **tokens, n=None, limits=(1.0, math.inf))
            for epsilon in spec.epsilons
        ),
        *(_number(f"effective_{n}", **tokens, n=n, limits=(1.0, float(n))) for n in FIXED),
    )


def _number(key: str, **known: object) -> Number:
    return Number(key, f"{key}_low", f"{key}_high", **known)  # type: ignore[arg-type]


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
        fixed, points = np.searchsorted(n, FIXED), fit_points(fit_range(spec, keys))
        points = np.searchsorted(n, points)
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
    """beta_fit, relative_<n>, local_slope_<n> and effective_<n> at FIXED, tokens_needed_<error>pct
    for the spec's errors.

    ``curve``: exact, of draws with replacement, on a ladder that has the n of the fit and FIXED;
    ``keys``: of the pool.
    """
    found = {"beta_fit": fitted(curve, fit_range(spec, keys))["beta_fit"]}
    places = _places(curve, np.array(FIXED))
    unknown = np.full(curve.n.size, np.nan)
    columns = {
        "relative": curve.relative,
        "local_slope": curve.slope,
        "effective": curve.effective_tokens,
    }
    for name, values in columns.items():
        known = unknown if values is None else values
        found |= {f"{name}_{n}": float(known[i]) for n, i in zip(FIXED, places, strict=True)}
    return found | {
        needed_column(epsilon): or_nan(tokens_needed, curve, epsilon) for epsilon in spec.epsilons
    }


def fitted(
    curve: ErrorCurve, fit: tuple[int, int], windows: Indices | None = None
) -> dict[str, float]:
    """The exponent over the half octaves of ``fit``, and its interval.

    ``windows`` (m,), the window of each query: the interval is over windows, since queries of one
    window are alike. None: the range of local slopes.
    """
    places = _places(curve, fit_points(fit))
    queries = curve.queries
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
    )
    part = replace(
        part, slope=None if curve.slope is None else curve.slope[places], q95=None, queries=queries
    )
    found = fit_rate(part, raise_on_failure=False)
    return {
        "beta_fit": found.exponent,
        "beta_low": found.interval[0],
        "beta_high": found.interval[1],
    }


def needed_column(epsilon: float) -> str:
    """tokens_needed_10pct for 0.1; 2.5 % is written 2_5pct."""
    return at_error("tokens_needed", epsilon)


def at_error(name: str, epsilon: float) -> str:
    """What a column is called that there is one of for each relative error."""
    return f"{name}_{percent(epsilon)}pct".replace(".", "_")


def percent(epsilon: float) -> str:
    return f"{100 * epsilon:g}"


def or_nan(question: Callable[[ErrorCurve, float], int], curve: ErrorCurve, value: float) -> float:
    """What a curve answers, or NaN where it never gets there."""
    try:
        return float(question(curve, value))
    except ValueError:  # not reached within the ladder
        return math.nan


def _places(curve: ErrorCurve, n: Indices) -> Indices:
    """Where these n stand in the curve."""
    places = np.searchsorted(curve.n, n)
    assert np.array_equal(curve.n[np.minimum(places, curve.n.size - 1)], n), (
        "the curve lacks an n that every curve has"
    )
    return places


# ---- What the numbers of a head do as more text is read, in words for someone who has not seen
# the theory.

NEEDED, EXPONENT, EFFECTIVE, ERROR = (
    "tokens_needed_10pct",
    "beta_fit",
    "effective_1024",
    "relative_1024",
)


def settled_sentence(rows: pd.DataFrame, status: str, keys: int, *, own: bool) -> str:
    """``rows``: the table ``endless`` of a head. ``own``: each query has a context of its own, of
    ``keys`` keys on average.
    """
    known = {str(row["number"]): row for row in rows.to_dict("records")}
    if own:
        return _own_context(known)
    if status == SETTLED:
        parts = [_exponent(known[EXPONENT]), _needed_between(known[NEEDED])]
        return (
            "Settled: more text of this kind would change these numbers little. An endless one has"
            f" {_joined(parts)}."
        )
    for key in (NEEDED, ERROR, EXPONENT, EFFECTIVE):
        row = known[key]
        if row["status"] == status and math.isfinite(row["value"]) and _known(row):
            return _unsettled(key, row, status, keys)
    return (
        f"Beyond the pool: a few of these {keys:,} tokens decide what the head gives, and more text"
        " may bring others that do; its numbers are those of this text alone."
    )


def _unsettled(key: str, row: Mapping[str, Any], status: str, keys: int) -> str:
    """What the number was on halves of the text, what it is, and what to expect."""
    say = {NEEDED: _tokens, ERROR: _percent, EXPONENT: _plain, EFFECTIVE: _tokens}[key]
    what = {
        NEEDED: "An error of 10 % takes {value} randomly drawn tokens",
        ERROR: "1,024 randomly drawn tokens leave an error of {value}",
        EXPONENT: "The error falls with exponent {value}",
        EFFECTIVE: "Of 1,024 randomly drawn tokens {value} share the attention",
    }[key]
    now = what.format(value=say(row["value"]))
    half = f", {say(row['half'])} on halves of it" if math.isfinite(row["half"]) else ""
    if status != BEYOND:
        return (
            f"Moving: {now[0].lower()}{now[1:]} on this text of {keys:,} tokens{half}. The number"
            f" is not at rest yet: an endless text of this kind has {say(row['low'])} to"
            f" {say(row['high'])}."
        )
    bound = (
        f"at least {say(row['low'])}"
        if math.isfinite(row["low"])
        else f"at most {say(row['high'])}"
    )
    return (
        f"Beyond the pool: {now[0].lower()}{now[1:]} on this text of {keys:,} tokens{half}. That"
        f" belongs to this much text: an endless one of this kind has {bound}. Read more text"
        " (--max-tokens) to know."
    )


def _own_context(known: Mapping[str, Mapping[str, Any]]) -> str:
    parts = [_exponent(known[EXPONENT])]
    effective = known[EFFECTIVE]
    if _known(effective):
        parts.append(
            f"{_tokens(effective['low'])} to {_tokens(effective['high'])} effective tokens among"
            " 1,024"
        )
    parts = [part for part in parts if part]
    if not parts:
        return "One window of text cannot tell how much other windows differ."
    return (
        "Each query is measured in its own context; other windows of such text have"
        f" {_joined(parts)}."
    )


def _exponent(row: Mapping[str, Any]) -> str:
    return f"an exponent of {_plain(row['low'])} to {_plain(row['high'])}" if _both(row) else ""


def _needed_between(row: Mapping[str, Any]) -> str:
    return (
        f"{_tokens(row['low'])} to {_tokens(row['high'])} tokens for an error of 10 %"
        if _both(row)
        else ""
    )


def _both(row: Mapping[str, Any]) -> bool:
    return math.isfinite(row["low"]) and math.isfinite(row["high"])


def _known(row: Mapping[str, Any]) -> bool:
    return math.isfinite(row["low"]) or math.isfinite(row["high"])


def _joined(parts: list[str]) -> str:
    return " and ".join(part for part in parts if part) or "the same numbers"


def _tokens(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{float(f'{value:.2g}'):,.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %" if value < 1 else f"{100 * value:.0f} %"


def _plain(value: float) -> str:
    return f"{value:.2f}"
