"""From an error curve to its rate: error ~ constant * n^-exponent, with an interval, a window and a
status that say why.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.special
import scipy.stats

from esscher.convergence.curve import ErrorCurve
from esscher.convergence.rate.points import Points, as_window, select_points
from esscher.convergence.rate.regression import (
    Line,
    fit_line,
    repeats_stderr,
    resample,
    resample_clusters,
)
from esscher.convergence.rate.result import (
    Curvature,
    FitError,
    LawComparison,
    RateFit,
    Status,
    Window,
)
from esscher.inputs import as_count, as_positive
from esscher.intervals import t_quantile

__all__ = ["FitError", "RateFit", "fit_rate", "log_slope"]

CURVED = 1e-3  # level at which one power law is given up
STRAIGHT = 1e-2  # level a suggested window must pass
FEW = 5  # repeats below which resampling them makes no sense
HEAVY = 0.5  # share of one repeat in the mean square from which on the repeats do not show the tail
# the largest power of 1 / log n that is taken for a law; hardmax has 1/2 [B, Proposition 5.1]
GAMMA = 2.0
PREFERRED = 0.95  # AIC weight from which on a law is preferred
NAN = float("nan")


def fit_rate(
    curve: ErrorCurve,
    *,
    window: Any = "auto",
    level: Any = 0.95,
    raise_on_failure: bool = True,
    seed: Any = 0,
) -> RateFit:
    """The exponent of error ~ constant * n^-exponent: a straight line through (log n, log rms).

    ``window``: "auto" takes every usable point; (n_min, n_max) only those between. Neither looks at
    how straight the points are: a curve that one power law does not describe (at 0.1 %) is fitted
    as it is and its status says so. Left out are errors at rounding level and points whose standard
    error exceeds half the error. ``level``: of the interval. With repeats: generalised least
    squares, interval by the bootstrap over repeats from ``seed`` (symmetric percentile-t). With
    standard errors only: weighted least squares, normal interval, points taken as independent.
    Exact curves: least squares, and the interval is the range of local slopes; where their queries
    come in clusters (windows of a text), what other clusters could give (percentile bootstrap over
    clusters from ``seed``). Raises ``FitError``, which carries what there is of the fit, unless
    ``raise_on_failure`` is False.
    """
    level = as_positive(level, "level")
    if level >= 1:
        raise ValueError(f"level: expected a number between 0 and 1, got {level}")
    seed = 0 if seed == 0 else as_count(seed, "seed")
    points, chosen, problem = select_points(curve, as_window(window))
    if problem is None:
        return _fit(points, chosen, level, seed)
    fit = _partial(points, chosen, level, problem)
    if raise_on_failure:
        raise FitError(fit)
    return fit


def _fit(points: Points, chosen: Window, level: float, seed: int) -> RateFit:
    line, bend = points.line(), points.line(degree=2)
    doubt = _DOUBT[points.evidence](points, line, bend, level, seed)
    exponent = -float(line.coefficients[1])
    return RateFit(
        exponent=exponent,
        constant=line.constant(points.x),
        interval=doubt.ends or (exponent - doubt.half_width, exponent + doubt.half_width),
        level=level,
        window=chosen,
        status=_status(points, doubt.p_value, seed),
        stderr=doubt.stderr,
        n=points.n,
        residuals=line.residuals,
        local_slopes=points.local_slopes(),
        curvature=Curvature(float(bend.coefficients[2]), doubt.bend_stderr, doubt.bend_p_value),
        power_vs_log=_compare_laws(points),
        chi2=line.misfit if points.evidence in ("repeats", "stderr") else NAN,
        dof=points.n.size - 2,
        p_value=doubt.p_value,
    )


def log_slope(curve: ErrorCurve) -> tuple[float, float]:
    """Slope of the line that ``fit_rate`` takes, and its standard error over the repeats; two
    points are enough for both.
    """
    points, _, _ = select_points(curve, None)
    if points.z is None or points.n.size < 2:
        raise ValueError(
            "curve: expected repeats that differ at 2 or more usable values of n, got"
            f" {points.n.size} values, {curve.kind}"
        )
    line = points.line()
    return float(line.coefficients[1]), float(repeats_stderr(points.z, line.weights[1:2])[0])


def _partial(points: Points, chosen: Window, level: float, problem: Status) -> RateFit:
    """What there is of a fit where none is given: a least-squares line if two points allow one, and
    no interval.
    """
    line = None
    if points.n.size > 1 and (np.diff(points.n) > 0).all() and np.isfinite(points.y).all():
        line = fit_line(points.x, points.y, np.eye(points.n.size))
    return RateFit(
        exponent=NAN if line is None else -float(line.coefficients[1]),
        constant=NAN if line is None else line.constant(points.x),
        interval=(NAN, NAN),
        level=level,
        window=chosen,
        status=problem,
        stderr=NAN,
        n=points.n,
        residuals=np.full(points.n.size, np.nan) if line is None else line.residuals,
        local_slopes=np.full(points.n.size, np.nan) if line is None else points.local_slopes(),
        curvature=Curvature(NAN, NAN, NAN),
        power_vs_log=None,
        chi2=NAN,
        dof=points.n.size - 2,
        p_value=NAN,
    )


@dataclass(frozen=True)
class _Doubt:
    """How far the exponent and the bend may be off, and whether the points are straight."""

    stderr: float
    half_width: float
    bend_stderr: float
    bend_p_value: float
    p_value: float  # of straightness
    ends: tuple[float, float] | None = None  # of an interval that is not exponent -+ half_width


def _from_repeats(points: Points, line: Line, bend: Line, level: float, seed: int) -> _Doubt:
    """The repeats resampled; with very few of them Student's quantile, and no test of
    straightness.
    """
    assert points.z is not None
    drawn = resample(points.z, line, np.stack([line.weights[1], bend.weights[2]]), seed)
    stderr, bend_stderr = float(drawn.stderr[0]), float(drawn.stderr[1])
    bend_value = float(bend.coefficients[2])
    repeats = points.z.shape[0]
    if repeats < FEW:
        half_width = stderr * t_quantile(repeats - 1, level)
        bend_p_value = 2 * float(scipy.stats.t.sf(abs(bend_value) / bend_stderr, repeats - 1))
        return _Doubt(stderr, half_width, bend_stderr, bend_p_value, NAN)
    p_value = drawn.misfit_p_value(line.misfit)
    return _Doubt(
        stderr, drawn.half_width(0, level), bend_stderr, drawn.p_value(1, bend_value), p_value
    )


def _from_stderr(points: Points, line: Line, bend: Line, level: float, seed: int) -> _Doubt:
    """Normal theory with the standard errors taken as known and the points as independent."""
    stderr, bend_stderr = math.sqrt(line.variance[1]), math.sqrt(bend.variance[2])
    bend_p_value = 2 * float(scipy.stats.norm.sf(abs(bend.coefficients[2]) / bend_stderr))
    half_width = stderr * float(scipy.stats.norm.ppf((1 + level) / 2))
    p_value = float(scipy.stats.chi2.sf(line.misfit, points.n.size - 2))
    return _Doubt(stderr, half_width, bend_stderr, bend_p_value, p_value)


def _from_scatter(points: Points, line: Line, bend: Line, level: float, seed: int) -> _Doubt:
    """Nothing known: the scatter about the line is the sampling error, so straightness cannot be
    tested.
    """
    dof = points.n.size - 2
    stderr = math.sqrt(line.misfit / dof * line.variance[1])
    bend_stderr = math.sqrt(bend.misfit / (dof - 1) * bend.variance[2]) if dof > 1 else NAN
    bend_p_value = (
        2 * float(scipy.stats.t.sf(abs(bend.coefficients[2]) / bend_stderr, dof - 1))
        if bend_stderr > 0
        else NAN
    )
    half_width = stderr * t_quantile(dof, level)
    return _Doubt(stderr, half_width, bend_stderr, bend_p_value, NAN)


def _from_slopes(points: Points, line: Line, bend: Line, level: float, seed: int) -> _Doubt:
    """No sampling error: the range of the slopes at and between the points, and what the curve's
    accuracy adds.
    """
    slopes = -np.concatenate([points.local_slopes(), np.diff(points.y) / np.diff(points.x)])
    margin = points.accuracy * float(np.abs(line.weights[1]).sum())
    ends = (float(slopes.min()) - margin, float(slopes.max()) + margin)
    return _Doubt(0.0, NAN, 0.0, NAN, NAN, ends)


def _from_queries(points: Points, line: Line, bend: Line, level: float, seed: int) -> _Doubt:
    """No sampling error at each query: what other clusters of queries could give."""
    assert points.clusters is not None
    drawn = resample_clusters(points.clusters, np.stack([line.weights[1], bend.weights[2]]), seed)
    low, high = np.quantile(-drawn[0], [(1 - level) / 2, (1 + level) / 2])
    return _Doubt(
        float(drawn[0].std()), NAN, float(drawn[1].std()), NAN, NAN, (float(low), float(high))
    )


_DOUBT = {
    "queries": _from_queries,
    "repeats": _from_repeats,
    "stderr": _from_stderr,
    "none": _from_scatter,
    "exact": _from_slopes,
}


def _status(points: Points, p_value: float, seed: int) -> Status:
    """Every note that applies; the code is that of the first."""
    notes = []
    if points.evidence == "exact":
        notes.append(
            (
                "exact",
                (
                    "exact curve: no sampling error; the interval is the range of local slopes over"
                    " the window"
                ),
            )
        )
    if points.clusters is not None:
        text = (
            f"exact at each query; interval from the bootstrap over {len(points.clusters)} clusters"
            " of queries"
        )
        notes.append(("exact", text))
    if points.evidence == "none":
        text = (
            "no standard errors: the scatter about the line stands for them; give repeats to test"
            " straightness"
        )
        notes.append(("no_stderr", text))
    if p_value < CURVED:
        notes.append(("curved", _curved(points, p_value, seed)))
    if points.z is not None:
        repeats, share = points.z.shape[0], points.z.max(axis=0) / points.z.shape[0]
        if repeats < FEW:
            text = (
                f"{repeats} repeats: Student's interval, too short where errors are skew; give at"
                " least 20 repeats"
            )
            notes.append(("few_repeats", text))
        elif share.max() > HEAVY:
            cause = (
                f"heavy tails: one repeat makes {share.max():.0%} of the mean square at n ="
                f" {points.n[share.argmax()]}"
            )
            text = (
                f"{cause}, so the exponent may be biased and the interval too short; give more"
                " repeats"
            )
            notes.append(("heavy_tail", text))
    if not notes:
        source = (
            "standard errors, points taken as independent"
            if points.z is None
            else f"bootstrap over {repeats} repeats"
        )
        notes.append(
            ("ok", f"one power law fits (straightness {_p(p_value)}); interval from {source}")
        )
    return Status(notes[0][0], "; ".join(text for _, text in notes))


def _p(p_value: float) -> str:
    return f"p = {p_value:.2g}" if p_value >= 1e-6 else "p < 1e-6"


def _curved(points: Points, p_value: float, seed: int) -> str:
    """Cause and remedy for points that are not straight: the longest upper end that is, named and
    not taken.
    """
    slopes = points.local_slopes()
    text = (
        f"one power law does not fit (straightness {_p(p_value)}): the exponent is an average of"
        f" local slopes from {slopes[0]:.3g} at n = {points.n[0]} to {slopes[-1]:.3g} at n ="
        f" {points.n[-1]}"
    )
    for start in range(1, points.n.size - 2):
        upper = points.only(slice(start, None))
        line, bend = upper.line(), upper.line(degree=2)
        if _DOUBT[points.evidence](upper, line, bend, 0.5, seed).p_value >= STRAIGHT:
            return (
                text + f"; window=({upper.n[0]}, {upper.n[-1]}) is straight, chosen after the fact;"
                " better give larger n"
            )
    return (
        text + "; no upper end of 3 points is straight: give larger n, or read power_vs_log and"
        " local_slopes"
    )


def _compare_laws(points: Points) -> LawComparison | None:
    """n^-exponent against (log n)^-gamma: the same least squares on log n and on log log n."""
    points = points.only(points.n >= 2)
    if points.n.size < 3:
        return None
    covariance = points.covariance()
    power, log = (
        fit_line(points.x, points.y, covariance),
        fit_line(np.log(points.x), points.y, covariance),
    )
    scores = [_log_likelihood(points, law.misfit) for law in (power, log)]
    weight = float(scipy.special.expit(scores[0] - scores[1]))
    preferred = (
        "power"
        if weight >= PREFERRED
        else "logarithmic"
        if weight <= 1 - PREFERRED
        else "undecided"
    )
    names = [f"n^{power.coefficients[1]:.3g}", f"(log n)^{log.coefficients[1]:.3g}"]
    if preferred == "logarithmic" and -log.coefficients[1] > GAMMA:
        preferred = "undecided"
        text = (
            f"{names[1]} is nearer than {names[0]}, as to any curve that bends; no logarithmic law"
            " is that fast"
        )
    elif preferred == "undecided":
        text = (
            f"the points do not decide between {names[0]} (AIC weight {weight:.2g}) and {names[1]}"
            f" ({1 - weight:.2g})"
        )
    else:
        names = names if preferred == "power" else names[::-1]
        text = f"{names[0]} is preferred to {names[1]}: AIC weight {max(weight, 1 - weight):.4g}"
    if (
        points.evidence in ("repeats", "stderr")
        and scipy.stats.chi2.sf(-2 * max(scores), points.n.size - 2) < CURVED
    ):
        text += "; neither describes the points"
    gamma, constant = -float(log.coefficients[1]), log.constant(np.log(points.x))
    return LawComparison(
        gamma, constant, scores[0] - scores[1], weight, 1 - weight, preferred, text
    )


def _log_likelihood(points: Points, misfit: float) -> float:
    """Largest Gaussian log likelihood of a line with this misfit Q, up to what all lines share.

    -Q / 2                                     standard errors known -(repeats / 2) log(1 + Q /
    (repeats - 1))  covariance unknown and maximised over -(points / 2) log(Q / points)
    scatter unknown; of an exact curve this is a score of misfit only
    """
    if points.z is not None:
        repeats = int(points.z.shape[0])
        return -0.5 * repeats * math.log1p(misfit / (repeats - 1))
    if points.evidence == "stderr":
        return -misfit / 2
    size = int(points.n.size)
    return -0.5 * size * math.log(misfit / size + max(points.accuracy, 1e-14) ** 2)
