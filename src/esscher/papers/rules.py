"""Functions that the rules of claims (in claims_*.py) are made of: an interval against a bound,
shares, means, rank correlations, rates fitted to stored errors; and series of pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from esscher import intervals
from esscher.errors.curve import ErrorCurve
from esscher.errors.rate import fit_rate
from esscher.intervals import Interval
from esscher.papers.claim import Decision, Picture, Series, Verdict

UNKNOWN = Interval(np.nan, -np.inf, np.inf)
LEVEL = 0.999
"""Level of the intervals that decide, high so that another seed seldom changes a verdict."""


# ---- Verdicts


def above(found: Interval, bound: float) -> Verdict:
    """Supported if the whole interval lies above the bound, refuted if all of it lies below."""
    return "supported" if found.low > bound else "refuted" if found.high < bound else "undecided"


def below(found: Interval, bound: float) -> Verdict:
    """Supported if the whole interval lies below the bound, refuted if all of it lies above."""
    return "supported" if found.high < bound else "refuted" if found.low > bound else "undecided"


def inside(found: Interval, least: float, most: float) -> Verdict:
    """Supported if the interval lies between two bounds, refuted if none of it does."""
    if found.low >= least and found.high <= most:
        return "supported"
    return "refuted" if found.high < least or found.low > most else "undecided"


def all_of(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict on a claim with parts: one refuted part refutes it, all together support it."""
    found = set(verdicts)
    if "refuted" in found:
        return "refuted"
    return "supported" if found == {"supported"} else "undecided"


@dataclass(frozen=True)
class Part:
    """A number that a claim needs somewhere, such as above 0.5, and the verdict on it. ``cases``:
    what was found in every case, drawn beside ``bounds`` where a claim has no picture of its own.
    """

    what: str
    found: Interval
    must: str
    verdict: Verdict
    cases: Mapping[Any, Interval] = field(default_factory=dict)
    bounds: Sequence[float] = ()
    title: str = ""

    def picture(self, x: str, log: str) -> Picture:
        """Cases by (label, x), a series for each label; others by their number."""
        placed = {
            key if isinstance(key, tuple) and len(key) == 2 else ("found", i): one
            for i, (key, one) in enumerate(self.cases.items())
        }
        ends = [float(pick(at for _, at in placed)) for pick in (min, max)] if placed else []
        lines = [line(f"{bound:g}", ends, bound) for bound in self.bounds]
        return Picture(x, self.title, [*series_of(placed), *lines], log)


Found = float | Interval | Mapping[Any, float | Interval]


def need(what: str, found: Found, rule: Callable[..., Verdict], *bounds: float) -> Part:
    """An estimate or a computed number, or every one of several by name, has to be ``rule`` (above,
    below, inside) the bounds. Of several the worst is told.
    """
    given = found if isinstance(found, Mapping) else {"": found}
    several = {
        name: one if isinstance(one, Interval) else exactly(one) for name, one in given.items()
    }
    words = "between" if rule is inside else rule.__name__
    must = f"{words} {' and '.join(f'{bound:g}' for bound in bounds)}"
    if not several:
        return Part(what, UNKNOWN, must, "undecided")

    def badness(name: Any) -> float:
        value = several[name].value
        if rule is inside:
            return abs(value - float(np.mean(bounds)))
        return value if rule is below else -value

    worst = max(several, key=badness)
    names = worst if isinstance(worst, tuple) else (worst,)
    told = [f"{name:g}" if isinstance(name, float) else str(name) for name in (what, *names)]
    return Part(
        ", ".join(filter(None, told)),
        several[worst],
        must,
        all_of(rule(one, *bounds) for one in several.values()),
        several,
        bounds,
        what,
    )


def decided(
    *parts: Part, picture: Picture | None = None, x: str = "case", log: str = "", note: str = ""
) -> Decision:
    """The decision that parts make together; it rests on the first part that decides. Without a
    picture of its own: the cases of the first part against ``x``.
    """
    verdict = all_of(part.verdict for part in parts)
    effect = next((part for part in parts if part.verdict == verdict), parts[0])
    told = [f"{part.what} = {shown(part.found)}, needed {part.must}" for part in parts]
    reason = "; ".join([*told, note] if note else told)
    return Decision(verdict, effect.what, effect.found, reason, picture or parts[0].picture(x, log))


# ---- Estimates with their intervals


def shown(found: Interval) -> str:
    """An estimate with its interval, as text."""
    ends = "" if found.low == found.high else f" [{found.low:.3g}, {found.high:.3g}]"
    return f"{found.value:.3g}{ends}"


def exactly(value: float) -> Interval:
    """A number that was computed and not estimated."""
    return Interval(float(value), float(value), float(value))


def each(found: Iterable[float], change: Callable[[float], float]) -> Interval:
    """An increasing function of an estimate and of its ends."""
    return Interval(*(float(change(end)) for end in found))


def share_of(hits: Any, total: int) -> Interval:
    """The share hits / total, with Wilson's interval."""
    return intervals.share_interval(float(hits), total, LEVEL)


def share_below(found: Sequence[Interval], bar: float) -> Interval:
    """The share of estimates below a bar. Its ends are those of two shares: of estimates whose
    whole interval lies below, and of those with some of it below.
    """
    sure, possible = sum(one.high < bar for one in found), sum(one.low < bar for one in found)
    value = share_of(sum(one.value < bar for one in found), len(found)).value
    return Interval(value, share_of(sure, len(found)).low, share_of(possible, len(found)).high)


def difference(a: Interval, b: Interval) -> Interval:
    """a - b of independent estimates: half widths add in squares."""
    value = a.value - b.value
    half = np.hypot(a.high - a.low, b.high - b.low) / 2
    return Interval(value, float(value - half), float(value + half))


def mean_interval(values: Iterable[float]) -> Interval:
    """The mean, with Student's interval; unbounded for a single value, which decides nothing."""
    found = intervals.mean_interval(list(values), LEVEL)
    return Interval(found.value, -np.inf, np.inf) if np.isnan(found.low) else found


def rank_correlation(x: Iterable[float], y: Iterable[float]) -> Interval:
    """Spearman's correlation."""
    return intervals.rank_correlation(list(x), list(y), LEVEL)


def bootstrapped(rows: pd.DataFrame, estimate: Callable[[pd.DataFrame], float]) -> Interval:
    """An estimate from rows, with percentiles of the bootstrap over them."""
    rng = np.random.default_rng(0)
    drawn = [estimate(rows.iloc[rng.integers(0, len(rows), len(rows))]) for _ in range(4000)]
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(estimate(rows), float(low), float(high))


def widened(value: float, low: float, high: float) -> Interval:
    """A stored 95 % interval at the level that decides, errors taken as normal."""
    factor = float(stats.norm.ppf((1 + LEVEL) / 2) / stats.norm.ppf(0.975))
    return Interval(value, value - factor * (value - low), value + factor * (high - value))


def exponent(errors: pd.DataFrame, metric: str, point: int = 0) -> Interval:
    """The rate fitted to the squared errors of every repeat (table ``errors`` of ``esscher
    converge``).
    """
    own = errors[(errors["metric"] == metric) & (errors["point"] == point)]
    squared = own.pivot(index="repeat", columns="n", values="squared").sort_index(axis=1)
    n = squared.columns.to_numpy(dtype=np.int64)
    curve = ErrorCurve.from_repeats(n, squared.to_numpy(dtype=np.float64), metric=metric)
    fit = fit_rate(curve, level=LEVEL, raise_on_failure=False)
    return Interval(fit.exponent, *fit.interval)


# ---- Series of pictures


def points(label: str, x: Any, y: Iterable[Any]) -> Series:
    """Points at x: numbers, or estimates with their intervals."""
    place, found = np.asarray(x, dtype=np.float64), np.array([*y], dtype=np.float64)
    return Series(label, place, *found.T) if found.ndim == 2 else Series(label, place, found)


def series_of(found: Mapping[tuple[Any, Any], Any]) -> list[Series]:
    """Points by (label, x), a series for each label."""
    by_label: dict[Any, dict[Any, Any]] = {}
    for (label, x), one in found.items():
        by_label.setdefault(label, {})[x] = one
    return [points(str(label), [*own], own.values()) for label, own in by_label.items()]


def line(label: str, x: Any, y: Any) -> Series:
    """A line through numbers y, or at one height."""
    place, height = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    return Series(label, place, np.broadcast_to(height, place.shape), line=True)


def diagonal(label: str, x: Any) -> Series:
    """The line y = x, from the smallest x to the largest."""
    ends = [float(np.min(x)), float(np.max(x))]
    return line(label, ends, ends)
