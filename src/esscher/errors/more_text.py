"""Will a number measured on a pool of text hold on more text? An estimate for an endless text, an
interval and a status.

A pool of N keys is cut into PIECES pieces of equal size, in the order of the text. T is a number
read off keys and queries, on a scale on which its errors are about symmetric (the logarithm of an
error, an exponent as it is). With T(N/2) the mean over both halves of the keys, T(N/4) over
quarters and T(N/8) over eighths, the same queries throughout:

    d1 = T(N) - T(N/2),   d2 = T(N/2) - T(N/4),   d3 = T(N/4) - T(N/8)
    estimate = T(N) + d1 R / (1 - R)        what doubling the pool again and again would add
    doubt    = DOUBT times the root mean square of d1, R d2 and R^2 d3, and at least LEAST near
    variance = (G - 1) / G sum_g (k_g + q_g)^2        jackknife: without the keys, and without the
                                                      queries, of piece g
    interval = estimate -+ t sqrt(alike variance + doubt^2)

with Student's t of G - 1 degrees of freedom. R is the ratio of a change to the one before it: a
smooth function of the pool has R = 1/2, heads on text have R near 2/3 (docs/reading_a_probe.md
has the coverage of the intervals). ``alike`` is 1 for independent pieces; a text keeps its topic
for longer than a piece, which made the variance 2.5 times larger on three texts.

A number is *beyond the text* where it is read at an n that the pool does not reach (``inside``
false), where changes do not shrink (their factor is above SHRINKING) or where one more doubling
would still change it by more than ``far``: then it has a bound on one side only. It is *converged*
where the interval and T(N) itself stay within ``near`` of the estimate, else *not converged*.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from esscher.intervals import t_quantile

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

PIECES = 8  # of a pool
SHRINK = 2 / 3  # R
DOUBT = 0.75
TEXT = 2.5  # alike, of pieces of a text
SHRINKING = 0.85  # factor from one change to the next above which changes do not shrink
LEAST = 1 / 20  # of ``near``
LEVEL = 0.9

CONVERGED, NOT_CONVERGED, BEYOND = "converged", "not converged", "beyond the text"
STATUSES = (CONVERGED, NOT_CONVERGED, BEYOND)


@dataclass(frozen=True)
class Extrapolation:
    """What k numbers are on an endless text, (k,) each; an infinite end is not known."""

    estimate: Floats
    low: Floats
    high: Floats
    status: npt.NDArray[Any]  # of STATUSES


def extrapolate(
    value: Floats,
    by_size: tuple[Floats, Floats, Floats, Floats],
    without: tuple[Floats, Floats],
    near: Floats,
    far: Floats,
    inside: Flags,
    *,
    frozen: bool = False,
    alike: float = 1.0,
) -> Extrapolation:
    """Estimates and intervals of k numbers, by the formulas at the top of this module.

    ``value`` (k,): on the whole pool and all queries. ``by_size``: the numbers on the whole pool
    and their means over halves, quarters and eighths, (k,) each, perhaps of fewer queries.
    ``without``: without the keys, and without the queries, of each piece, (G, k) each. ``inside``
    (k,): the pool reaches the n of the number. ``frozen``: a few keys decide, so that more text may
    move a number either way; it has no bound unless its changes show one.
    """
    whole, half, quarter, eighth = by_size
    changes = np.stack([whole - half, half - quarter, quarter - eighth])
    shrunk = changes * SHRINK ** np.arange(3)[:, None]
    doubt = np.hypot(DOUBT * np.sqrt(np.square(shrunk).mean(axis=0)), LEAST * near)
    stderr = np.sqrt(alike * jackknife_variance(*without))
    t = t_quantile(len(without[0]) - 1, LEVEL)
    estimate = value + changes[0] * SHRINK / (1 - SHRINK)
    half_width = t * np.hypot(stderr, doubt)
    beyond = ~inside | _not_shrinking(changes, near, far)
    with np.errstate(invalid="ignore"):
        rising, falling = beyond & (changes[0] > 0), beyond & (changes[0] <= 0)
        low = np.select([rising, falling], [value - t * stderr, -np.inf], estimate - half_width)
        high = np.select([rising, falling], [np.inf, value + t * stderr], estimate + half_width)
        close = (half_width <= near) & (np.abs(estimate - value) <= near)
    unbounded = ~np.isfinite(value) | (~beyond if frozen else False)
    low, high = np.where(unbounded, -np.inf, low), np.where(unbounded, np.inf, high)
    status = np.where(beyond | unbounded, BEYOND, np.where(close, CONVERGED, NOT_CONVERGED))
    return Extrapolation(estimate, low, high, status)


def other_text(value: Floats, without_queries: Floats, near: Floats) -> Extrapolation:
    """Intervals of k numbers of queries that each have a context of their own: no pool grows.

    ``without_queries`` (G, k): without the queries of each of G windows of text. One window leaves
    no interval.
    """
    if len(without_queries) < 2:
        open_end = np.full(len(value), np.inf)
        return Extrapolation(value, -open_end, open_end, np.full(len(value), NOT_CONVERGED))
    stderr = np.sqrt(jackknife_variance(np.zeros_like(without_queries), without_queries))
    half_width = t_quantile(len(without_queries) - 1, LEVEL) * stderr
    status = np.where(half_width <= near, CONVERGED, NOT_CONVERGED)
    return Extrapolation(value, value - half_width, value + half_width, status)


def jackknife_variance(without_keys: Floats, without_queries: Floats) -> Floats:
    """(k,) from (G, k) each; keys and queries of a piece are not believed to cancel."""
    k, q = (x - x.mean(axis=0) for x in (without_keys, without_queries))
    together, apart = np.square(k + q).sum(axis=0), (np.square(k) + np.square(q)).sum(axis=0)
    found: Floats = (len(k) - 1) / len(k) * np.maximum(together, apart)
    return found


def _not_shrinking(changes: Floats, near: Floats, far: Floats) -> Flags:
    """Where changes do not shrink, or are still large; or a pool does not have the number (NaN)."""
    d1, d2, d3 = changes
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = (d1 * d2 + d2 * d3) / (np.square(d2) + np.square(d3))
        lasting = (factor > SHRINKING) & (np.abs(d1) > near / 2)
        found: Flags = lasting | (np.abs(d1) > far) | ~np.isfinite(changes).all(axis=0)
    return found
