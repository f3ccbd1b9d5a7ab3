"""The numbers of a head that compare between pools, models and texts: all from its error curve, at
n that are always the same.

The exponent is fitted to the half octaves of a range (``fit_range``) and to no other n: the same n
for every corpus, in own contexts up to an eighth of a query's keys. Error, local slope and
effective tokens are those at FIXED. The ladder of draws with replacement (``drawn_ladder``) has all
of them, whatever the pool's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from esscher.convergence.budget import tokens_needed
from esscher.convergence.curve import ErrorCurve
from esscher.convergence.rate.fit import fit_rate
from esscher.models.probe.spec import FIT, FIXED, ProbeSpec, fit_points, fit_range

__all__ = [
    "Number",
    "at_error",
    "fitted",
    "headline",
    "headline_numbers",
    "needed_column",
    "or_nan",
    "percent",
    "read_numbers",
]

Indices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Number:
    """A headline number: its column, and its scale.

    ``log``: it is compared by ratio. ``near`` and ``far``: as in esscher.convergence.endless, of
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
