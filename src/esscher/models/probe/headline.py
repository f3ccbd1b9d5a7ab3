"""The numbers of a head that compare between pools, models and texts: all from its error curve, at n that are always the same.

The exponent is fitted to the half octaves of the spec's range ``fit`` and to no other n; error and local slope are those at
FIXED. The ladder of draws with replacement (``drawn_ladder``) has all of them, whatever the size of the pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from esscher.convergence.budget import tokens_needed
from esscher.convergence.curve import ErrorCurve
from esscher.convergence.rate.fit import fit_rate
from esscher.models.probe.spec import FIXED, ProbeSpec, fit_points

__all__ = ["at_error", "fitted", "headline", "needed_column", "or_nan", "percent"]

Indices = npt.NDArray[np.int64]


def headline(curve: ErrorCurve, spec: ProbeSpec, windows: Indices | None = None) -> dict[str, float]:
    """beta_fit with its interval, relative_<n> and local_slope_<n> at FIXED, tokens_needed_<error>pct for the spec's errors.

    ``curve``: exact, of draws with replacement, on a ladder that has the n of the fit and FIXED. ``windows``: as in ``fitted``.
    """
    found = fitted(curve, spec.fit, windows)
    places = _places(curve, np.array(FIXED))
    slope = np.full(curve.n.size, np.nan) if curve.slope is None else curve.slope
    found |= {f"relative_{n}": float(curve.relative[i]) for n, i in zip(FIXED, places, strict=True)}
    found |= {f"local_slope_{n}": float(slope[i]) for n, i in zip(FIXED, places, strict=True)}
    return found | {needed_column(epsilon): or_nan(tokens_needed, curve, epsilon) for epsilon in spec.epsilons}


def fitted(curve: ErrorCurve, fit: tuple[int, int], windows: Indices | None = None) -> dict[str, float]:
    """The exponent over the half octaves of ``fit``, and its interval.

    ``windows`` (m,), the window of each query: the interval is over windows, since queries of one window are alike. None: the
    range of local slopes.
    """
    places = _places(curve, fit_points(fit))
    queries = curve.queries
    if queries is not None:
        queries = replace(queries, mse=queries.mse[:, places], sum_p2=queries.sum_p2[:, places], clusters=windows)
    part = replace(curve, n=curve.n[places], rms=curve.rms[places], stderr=curve.stderr[places], query_stderr=np.zeros(0))
    part = replace(part, slope=None if curve.slope is None else curve.slope[places], q95=None, queries=queries)
    found = fit_rate(part, raise_on_failure=False)
    return {"beta_fit": found.exponent, "beta_low": found.interval[0], "beta_high": found.interval[1]}


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
    assert np.array_equal(curve.n[np.minimum(places, curve.n.size - 1)], n), "the curve lacks an n that every curve has"
    return places
