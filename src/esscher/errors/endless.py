"""A number of a finite pool as one of an endless text: where it goes as the pool grows, an
interval, and how settled it is.

A pool of N keys is cut into PIECES pieces of equal size, one after the other as the text goes. T is
a number read off keys and queries, on a scale on which its errors are about symmetric (the
logarithm of an error, an exponent as it is). With T(N / 2) the mean over both halves of the keys,
T(N / 4) over quarters and T(N / 8) over eighths, the same queries throughout:

    d1 = T(N) - T(N/2),   d2 = T(N/2) - T(N/4),   d3 = T(N/4) - T(N/8)
    estimate = T(N) + d1 R / (1 - R)
    what doubling the pool again and again would add
    doubt    = DOUBT times the root mean square of d1, R d2 and R^2 d3, and at least ``least``
    variance = (G - 1) / G sum_g (k_g + q_g)^2
    jackknife: k_g without the keys of piece g, q_g without its queries
    interval = estimate -+ t sqrt(alike variance + doubt^2)

with Student's t of G - 1 degrees of freedom. R is how much smaller a change is than the one before
it: a smooth function of the pool has R = 1/2, its bias falls like 1/N; heads on text have R near
2/3 (docs/endless.md: measured, with the share of intervals that cover what a large pool gives).
``alike`` is 1 for independent pieces. A text changes its topic more slowly than pieces follow each
other, and 2.5 is what that made of the variance on three texts.

A number is *beyond the pool* where it is read at an n of which the pool does not tell (``inside``
false), where changes do not shrink (their factor is above SHRINKING) or where one more doubling
would still change it by more than ``far``. No sum of changes is to be trusted there: it has a bound
on the side that it comes from alone. It is *settled* where the interval and T(N) itself stay within
``near`` of the estimate, *moving* where they do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from esscher.intervals import t_quantile

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Words = npt.NDArray[Any]  # of words

PIECES = 8  # of a pool
SHRINK = 2 / 3  # R
DOUBT = 0.75
TEXT = 2.5  # alike, of pieces of a text
SHRINKING = 0.85  # factor from one change to the next above which changes do not shrink
LEAST = 1 / 20  # of ``near``, that is always in doubt
LEVEL = 0.9

SETTLED, MOVING, BEYOND = "settled", "moving", "beyond the pool"
STATUSES = (SETTLED, MOVING, BEYOND)


@dataclass(frozen=True)
class Scale:
    """How far is far, for k numbers, (k,) each."""

    near: Floats  # of the estimate: settled
    far: Floats  # change by one more doubling: beyond the pool


@dataclass(frozen=True)
class Sizes:
    """k numbers on pools of different sizes, (k,) each: means over halves, quarters and eighths of
    the whole.
    """

    whole: Floats
    half: Floats
    quarter: Floats
    eighth: Floats

    @property
    def changes(self) -> Floats:
        """d1, d2 and d3, (3, k)."""
        return np.stack(
            [self.whole - self.half, self.half - self.quarter, self.quarter - self.eighth]
        )


@dataclass(frozen=True)
class Without:
    """k numbers without the keys, and without the queries, of each of G pieces, (G, k) each."""

    keys: Floats
    queries: Floats

    @property
    def variance(self) -> Floats:
        """Jackknife, (k,); keys and queries of a piece may by chance seem to cancel, which is not
        believed.
        """
        k, q = (x - x.mean(axis=0) for x in (self.keys, self.queries))
        together, apart = np.square(k + q).sum(axis=0), (np.square(k) + np.square(q)).sum(axis=0)
        found: Floats = (len(k) - 1) / len(k) * np.maximum(together, apart)
        return found


@dataclass(frozen=True)
class Endless:
    """What k numbers are in an endless text, (k,) each; an end that is infinite is not known."""

    estimate: Floats
    low: Floats
    high: Floats
    status: Words
    # of the number, from other text of the same kind: without the doubt about pools of other sizes
    stderr: Floats


def endless(
    value: Floats,
    sizes: Sizes,
    without: Without,
    scale: Scale,
    inside: Flags,
    *,
    frozen: bool = False,
    alike: float = 1.0,
) -> Endless:
    """The interval of k numbers for an endless text, by the formulas at the top of this module.

    ``value`` (k,): on the whole pool and all queries; ``sizes`` may be of fewer queries. ``inside``
    (k,): the pool tells of the n that a number is read at. ``frozen``: a few keys decide, so that
    more of the text may move a number either way: it has no bound at all, unless its changes show
    one.
    """
    changes = sizes.changes
    shrunk = changes * SHRINK ** np.arange(3)[:, None]
    doubt = np.hypot(DOUBT * np.sqrt(np.square(shrunk).mean(axis=0)), LEAST * scale.near)
    stderr = np.sqrt(alike * without.variance)
    t = t_quantile(len(without.keys) - 1, LEVEL)
    estimate = value + changes[0] * SHRINK / (1 - SHRINK)
    half_width = t * np.hypot(stderr, doubt)
    beyond = ~inside | _lasting(changes, scale)
    with np.errstate(invalid="ignore"):
        rising, falling = beyond & (changes[0] > 0), beyond & (changes[0] <= 0)
        low = np.select([rising, falling], [value - t * stderr, -np.inf], estimate - half_width)
        high = np.select([rising, falling], [np.inf, value + t * stderr], estimate + half_width)
        close = (half_width <= scale.near) & (np.abs(estimate - value) <= scale.near)
    if frozen:
        low, high = np.where(beyond, low, -np.inf), np.where(beyond, high, np.inf)
    unknown = ~np.isfinite(value)
    low, high = np.where(unknown, -np.inf, low), np.where(unknown, np.inf, high)
    status = np.where(beyond | frozen | unknown, BEYOND, np.where(close, SETTLED, MOVING))
    return Endless(estimate, low, high, status, stderr)


def other_text(value: Floats, queries: Floats, scale: Scale) -> Endless:
    """The interval of k numbers of queries that each have a pool of their own, which is all there
    is of it: no pool grows.

    ``queries`` (G, k): the numbers without the queries of each of G windows of text. One window
    alone leaves no interval.
    """
    if len(queries) < 2:
        open_end = np.full(len(value), np.inf)
        return Endless(value, -open_end, open_end, np.full(len(value), MOVING), open_end)
    stderr = np.sqrt(Without(np.zeros_like(queries), queries).variance)
    half_width = t_quantile(len(queries) - 1, LEVEL) * stderr
    status = np.where(half_width <= scale.near, SETTLED, MOVING)
    return Endless(value, value - half_width, value + half_width, status, stderr)


def _lasting(changes: Floats, scale: Scale) -> Flags:
    """Where changes do not shrink, or are still large; a number that some pool does not reach (NaN)
    as well.
    """
    d1, d2, d3 = changes
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = (d1 * d2 + d2 * d3) / (np.square(d2) + np.square(d3))
        lasting = (factor > SHRINKING) & (np.abs(d1) > scale.near / 2)
        found: Flags = lasting | (np.abs(d1) > scale.far) | ~np.isfinite(changes).all(axis=0)
    return found
