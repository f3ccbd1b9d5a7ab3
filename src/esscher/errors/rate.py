"""fit_rate: the exponent of error ~ constant * n^-exponent, with an interval and a status."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.stats

from esscher.errors.curve import ErrorCurve, Floats
from esscher.inputs import as_count, as_kind, as_positive
from esscher.intervals import t_quantile

Counts = npt.NDArray[np.int64]
NAN = float("nan")

# which points are fitted
ROUNDING = 1e-12  # of the limit's size: smaller errors are rounding
NOISY = 0.5  # standard error over error above which a point is left out
INACCURATE = 1 / 3  # relative accuracy of a curve above which nothing is fitted
# what the fit says
CURVED = 1e-3  # level at which one power law is rejected
HEAVY = 0.5  # share of one repeat in a mean square that is reported as a heavy tail
# the bootstrap
RESAMPLES = 1999
CLUSTER_RESAMPLES = 400  # a percentile interval needs fewer than percentile-t
BLOCK = 1 << 17  # numbers held at once while resampling
FEW = 5  # repeats below which Student's interval is used
NO_SPREAD = 1e-13  # smaller standard errors are rounding: the repeats differ by a factor only
# the working covariance
PER_POINT = 10  # repeats per point below which the sample covariance is not used
TIES = np.geomspace(1e-3, 0.999, 40)  # correlations of neighbours that are tried
FLOORS = np.linspace(0.0, 0.9, 10)  # correlations of distant points that are tried


@dataclass(frozen=True)
class Status:
    """A short code, and a text with the cause and the remedy.

    Fitted: "ok", "exact", "curved", "few_repeats", "heavy_tail". Not fitted (``failed``):
    "too_few_points", "rounding", "noisy", "invalid".
    """

    code: str
    text: str
    failed: bool = False


@dataclass(frozen=True)
class Window:
    """Smallest and largest n of the fitted points, their number, and the rule that chose them."""

    n_min: int
    n_max: int
    points: int
    rule: str


@dataclass(frozen=True, repr=False)
class RateFit:
    """error ~ ``constant`` * n^-``exponent``.

    ``interval``: of the exponent, at ``level``; for an exact curve the range of its local slopes.
    ``local_slopes``: d log rms / d log n at each n, analytic where the curve has them.
    ``p_value``: of straightness, NaN where there is no sampling error to compare with.
    """

    exponent: float
    constant: float
    interval: tuple[float, float]
    level: float
    window: Window
    status: Status
    stderr: float
    n: Counts
    local_slopes: Floats
    p_value: float

    def __repr__(self) -> str:
        return f"RateFit({self})"

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"error ~ {self.constant:.4g} n^{-self.exponent:.4g}, interval [{low:.4g}, {high:.4g}],"
            f" {self.window.points} points from n = {self.window.n_min} to {self.window.n_max};"
            f" {self.status.code}: {self.status.text}"
        )


class FitError(ValueError):
    """No rate can be given; ``fit`` holds what was found, and its status the cause and remedy."""

    def __init__(self, fit: RateFit) -> None:
        super().__init__(f"curve: {fit.status.text}")
        self.fit = fit


def fit_rate(
    curve: ErrorCurve,
    *,
    window: Any = "auto",
    level: Any = 0.95,
    raise_on_failure: bool = True,
    seed: Any = 0,
) -> RateFit:
    """The exponent of error ~ constant * n^-exponent: a straight line through (log n, log rms).

    ``window``: "auto" takes every usable point; (n_min, n_max) only those between. Left out are
    errors at rounding level and points whose standard error exceeds half the error. Points are
    never dropped to make the line straight: where one power law is rejected (at 0.1 %) the status
    says so. ``level``: of the interval, which comes from

    - repeats: generalised least squares, symmetric percentile-t bootstrap over repeats;
    - standard errors only: weighted least squares, normal, points taken as independent;
    - an exact curve: least squares, the range of local slopes;
    - an exact curve whose queries come in clusters (windows of a text): percentile bootstrap over
      clusters.

    ``seed``: of the bootstrap. Raises ``FitError``, which carries what there is of the fit, unless
    ``raise_on_failure`` is False.
    """
    level = as_positive(level, "level")
    if level >= 1:
        raise ValueError(f"level: expected a number between 0 and 1, got {level}")
    seed = 0 if seed == 0 else as_count(seed, "seed")
    at, rule, problem = _usable(as_kind(curve, ErrorCurve, "curve"), window)
    n = curve.n[at]
    ends = (int(n[0]), int(n[-1])) if n.size else (0, 0)
    chosen = Window(*ends, points=n.size, rule=rule)
    if problem is None:
        return _fit(curve, at, chosen, level, seed)
    # a least-squares line where two points allow one, without an interval
    exponent = constant = NAN
    slopes = np.full(n.size, np.nan)
    sound = (np.isfinite(curve.rms[at]) & (curve.rms[at] > 0)).all()
    if n.size > 1 and (np.diff(n) > 0).all() and sound:
        line = fit_line(*_logs(curve, at), np.eye(n.size))
        exponent, constant, slopes = -line.slope, line.constant, _local_slopes(curve, at)
    fit = RateFit(exponent, constant, (NAN, NAN), level, chosen, problem, NAN, n, slopes, NAN)
    if raise_on_failure:
        raise FitError(fit)
    return fit


# ---- Which points are fitted, and what forbids a fit.


def _usable(curve: ErrorCurve, window: Any) -> tuple[Counts, str, Status | None]:
    """Places of the usable points by increasing n, the rule that chose them, and what is wrong."""
    low, high, rule = -math.inf, math.inf, "all points"
    if not (isinstance(window, str) and window == "auto"):
        try:
            low, high = (as_positive(end, "window") for end in window)
        except (TypeError, ValueError) as cause:
            raise ValueError(
                f'window: expected "auto" or (n_min, n_max), got {window!r}'
            ) from cause
        if low >= high:
            raise ValueError(f"window: expected n_min < n_max, got {window!r}")
        rule = f"points with n from {low:g} to {high:g}, as given"
    if curve.samples is not None and curve.samples.shape[1:] != curve.n.shape:
        raise ValueError(
            f"curve.samples: expected squared errors, (repeats, {curve.n.size}), got shape"
            f" {curve.samples.shape}"
        )
    order = np.argsort(curve.n, kind="stable")
    order = order[(curve.n[order] >= low) & (curve.n[order] <= high)]
    n, rms, stderr = curve.n[order], curve.rms[order], curve.stderr[order]
    bad = ~(np.isfinite(rms) & (rms > 0))
    code, text = "invalid", ""
    if curve.accuracy >= INACCURATE:
        code = "rounding"
        text = (
            f"the errors are only known to {curve.accuracy:.2g} of themselves: compute the curve"
            " more accurately"
        )
    elif bad.any():
        text = (
            f"the error is {rms[bad][0]} at n = {n[bad][0]}, where a rate needs finite errors above"
            " 0: leave that n out with window=(n_min, n_max), or compute the error anew"
        )
    elif (np.diff(n) == 0).any():
        text = f"n repeats ({_listed(n)}): put all repeats at one n into one point"
    elif not (stderr > 0).all() and (curve.kind == "montecarlo" or stderr.any()):
        text = (
            "stderr is 0, negative or NaN at some points: give at least two repeats that differ, or"
            " leave points out by window"
        )
    if text:
        return order, rule, Status(code, text, True)
    known = math.isfinite(curve.scale) and curve.scale > 0
    rounding = rms <= ROUNDING * (curve.scale if known else float(rms.max(initial=0.0)))
    noisy = ~rounding & (stderr > NOISY * rms)
    usable = order[~rounding & ~noisy]
    plural = "" if usable.size == 1 else "s"
    have = f"{usable.size} usable point{plural}, where a rate and the test of it need 3"
    code, text = "too_few_points", f"{have}: give a longer ladder of n or a wider window"
    for name, dropped, what, remedy in (
        ("noisy", noisy, "standard error exceeds half the error", "more repeats"),
        ("rounding", rounding, "error is at rounding level", "smaller n"),
    ):
        if dropped.any():
            rule += f", without the {dropped.sum()} whose {what} (n = {_listed(n[dropped])})"
            code = name
            text = f"the {what} at {dropped.sum()} points; {have}: give {remedy}"
    return usable, rule, None if usable.size >= 3 else Status(code, text, True)


def _listed(n: Counts) -> str:
    return ", ".join(map(str, n[:5].tolist())) + (", ..." if n.size > 5 else "")


def _logs(curve: ErrorCurve, at: Counts) -> tuple[Floats, Floats]:
    return np.log(curve.n[at].astype(np.float64)), np.log(curve.rms[at])


def _local_slopes(curve: ErrorCurve, at: Counts) -> Floats:
    if curve.slope is not None and np.isfinite(curve.slope[at]).all():
        return curve.slope[at]
    x, y = _logs(curve, at)
    return np.asarray(np.gradient(y, x))


# ---- The line, its interval and its status.


def _fit(curve: ErrorCurve, at: Counts, chosen: Window, level: float, seed: int) -> RateFit:
    n, (x, y), slopes = curve.n[at], _logs(curve, at), _local_slopes(curve, at)
    relative, clusters = curve.stderr[at] / curve.rms[at], _cluster_sums(curve, at)
    p_value, notes = NAN, list[tuple[str, str]]()
    if curve.samples is not None:
        z = curve.samples[:, at] / curve.samples[:, at].mean(axis=0)
        line = fit_line(x, y, working_covariance(x, z))
        repeats, stderr = len(z), repeats_stderr(z, line.weights[1])
        source = f"bootstrap over {repeats} repeats"
        reach = t_quantile(repeats - 1, level)
        if repeats >= FEW:
            t, misfits = resample(z, line, seed)
            reach = float(np.quantile(t, level, method="higher")) if stderr >= NO_SPREAD else 0.0
            p_value = misfit_p_value(line.misfit, misfits)
        share = z.max(axis=0) / repeats
        if repeats < FEW:
            text = (
                f"{repeats} repeats: Student's interval, too short where errors are skew; give at"
                " least 20 repeats"
            )
            notes.append(("few_repeats", text))
        elif share.max() > HEAVY:
            text = (
                f"heavy tails: one repeat makes {share.max():.0%} of the mean square at n ="
                f" {n[share.argmax()]}, so the exponent may be biased and the interval too"
                " short; give more repeats"
            )
            notes.append(("heavy_tail", text))
    elif clusters is None and relative.any():
        line = fit_line(x, y, np.diag(relative**2))
        source = "standard errors, points taken as independent"
        stderr = math.sqrt(line.variance)
        reach = float(scipy.stats.norm.ppf((1 + level) / 2))
        p_value = float(scipy.stats.chi2.sf(line.misfit, n.size - 2))
    else:
        line, stderr, reach = fit_line(x, y, np.eye(n.size)), 0.0, 0.0
        source = "range of local slopes"
    interval = (-line.slope - stderr * reach, -line.slope + stderr * reach)
    if clusters is not None:
        drawn = -resample_clusters(clusters, line.weights[1], seed)
        stderr = float(drawn.std())
        low, high = (float(np.quantile(drawn, (1 + side * level) / 2)) for side in (-1, 1))
        interval = (low, high)
        source = f"bootstrap over {len(clusters)} clusters of queries"
        notes = [("exact", f"exact at each query; interval from the {source}")]
    elif not relative.any():
        margin = curve.accuracy * float(np.abs(line.weights[1]).sum())
        between = np.concatenate([slopes, np.diff(y) / np.diff(x)])
        interval = (-float(between.max()) - margin, -float(between.min()) + margin)
        text = (
            "exact curve: no sampling error; the interval is the range of local slopes over the"
            " window"
        )
        notes = [("exact", text)]
    straight = f"straightness {f'p = {p_value:.2g}' if p_value >= 1e-6 else 'p < 1e-6'}"
    if p_value < CURVED:
        text = (
            f"one power law does not fit ({straight}): the exponent is an average of local slopes"
            f" from {slopes[0]:.3g} at n = {n[0]} to {slopes[-1]:.3g} at n ="
            f" {n[-1]}; give larger n or a window, or read local_slopes"
        )
        notes.insert(0, ("curved", text))
    notes = notes or [("ok", f"one power law fits ({straight}); interval from {source}")]
    return RateFit(
        exponent=-line.slope,
        constant=line.constant,
        interval=interval,
        level=level,
        window=chosen,
        status=Status(notes[0][0], "; ".join(text for _, text in notes)),
        stderr=stderr,
        n=n,
        local_slopes=slopes,
        p_value=p_value,
    )


def _cluster_sums(curve: ErrorCurve, at: Counts) -> Floats | None:
    """Squared errors summed over each cluster's queries, (clusters, points)."""
    if curve.queries is None or curve.queries.clusters is None:
        return None
    groups = np.unique(curve.queries.clusters, return_inverse=True)[1]
    if groups.max() == 0:
        return None
    return np.stack([np.bincount(groups, mse) for mse in curve.queries.mse[:, at].T], axis=1)


# ---- Generalised least squares.


@dataclass(frozen=True)
class Line:
    """A straight line in x - mean(x) fitted by generalised least squares, linear in y."""

    height: float  # at mean(x)
    slope: float
    constant: float  # exp of the line's height at x = 0
    weights: Floats  # (height, slope) = weights @ y
    variance: float  # of the slope, if the covariance given is the true one
    misfit: float  # residuals^T covariance^-1 residuals
    whitened: Floats  # takes y to the whitened residuals, whose squares sum to the misfit


def fit_line(x: Floats, y: Floats, covariance: Floats) -> Line:
    """The line that makes (y - line(x))^T covariance^-1 (y - line(x)) smallest (Aitken 1936)."""
    powers = np.vander(x - x.mean(), 2, increasing=True)
    root = np.linalg.cholesky(covariance)
    inverse = np.linalg.pinv(np.linalg.solve(root, powers))
    weights = np.linalg.solve(root.T, inverse.T).T
    whitened = np.linalg.solve(root, np.eye(x.size) - powers @ weights)
    height, slope = map(float, weights @ y)
    return Line(
        height=height,
        slope=slope,
        constant=float(np.exp(height - slope * x.mean())),
        weights=weights,
        variance=float((inverse[1] ** 2).sum()),
        misfit=float(((whitened @ y) ** 2).sum()),
        whitened=whitened,
    )


def working_covariance(x: Floats, z: Floats) -> Floats:
    """Covariance of y = log(mean square) / 2 by the delta method, steadied for few repeats:

        cov / (4 repeats),   cov = (1 - share) sample + share target,
        target_ij = sqrt(d_i d_j) (floor + (1 - floor) rho^(|x_i - x_j| / mean gap)),
        log d linear in x.

    The sample covariance alone must not weigh the points: with 20 repeats of 8 points its inverse
    fits the noise, and 95 % intervals cover 69 to 83 %. The target holds for prefixes of one
    sample (squared errors at n < m have correlation n / m), for independent points (rho = floor =
    0) and for repeats with a common factor (floor > 0). ``share`` has the smallest expected
    squared error (Ledoit and Wolf 2004, in the form of Schaefer and Strimmer 2005), but is at
    least PER_POINT points / repeats. Intervals and tests do not rest on this covariance: the
    repeats themselves give the variance of what it weighs (Liang and Zeger 1986).
    """
    repeats = z.shape[0]
    centred = z - z.mean(axis=0)
    sample = centred.T @ centred / (repeats - 1)
    variances = np.diag(sample)
    smooth = np.exp(np.polynomial.Polynomial.fit(x, np.log(variances), 1)(x))
    smooth *= variances.sum() / smooth.sum()
    # the floor and the tie whose correlations are nearest to the sample's
    gaps = np.abs(x[:, None] - x[None, :]) / np.abs(np.diff(x)).mean()
    rows, columns = np.triu_indices(x.size, 1)
    seen = sample[rows, columns] / np.sqrt(variances[rows] * variances[columns])
    floors = FLOORS[:, None, None]
    tried = floors + (1 - floors) * TIES[:, None] ** gaps[rows, columns]
    i, j = np.unravel_index(((tried - seen) ** 2).sum(axis=2).argmin(), tried.shape[:2])
    correlation = FLOORS[i] + (1 - FLOORS[i]) * TIES[j] ** gaps
    target = np.sqrt(np.outer(smooth, smooth)) * correlation

    squares = (centred**2).T @ centred**2 - sample**2 * (repeats - 1) ** 2 / repeats
    noise = float(squares.sum()) * repeats / (repeats - 1) ** 3
    apart = float(((sample - target) ** 2).sum())
    share = min(1.0, max(noise / apart, PER_POINT * x.size / repeats)) if apart > 0 else 1.0
    return np.asarray(((1 - share) * sample + share * target) / (4 * repeats))


# ---- The bootstrap.


def repeats_stderr(z: Floats, weights: Floats) -> float:
    """Standard error of weights @ y by the delta method.

    Repeat r moves it by sum_i weights_i (z_ri - 1) / 2; the spread of that over repeats includes
    the correlation between points.
    """
    return float((z @ weights / 2).std(ddof=1) / np.sqrt(len(z)))


def resample(z: Floats, line: Line, seed: int) -> tuple[Floats, Floats]:
    """|slope* - slope| / stderr* and the misfit of a straight truth, for repeats drawn with
    replacement; the weights of the line stay as they are. Symmetric percentile-t: Hall 1988.
    """
    repeats, weights = len(z), line.weights[1]
    generator = np.random.default_rng(seed)
    # a bootstrap of r repeats has (r - 1) / r of the variance
    whitened = line.whitened * np.sqrt(repeats / (repeats - 1))
    parts = []
    size = max(1, BLOCK // repeats)
    for start in range(0, RESAMPLES, size):
        rows = min(size, RESAMPLES - start)
        drawn = generator.integers(repeats, size=(rows, repeats))
        places = (drawn + repeats * np.arange(rows)[:, None]).ravel()
        counts = np.bincount(places, minlength=rows * repeats).reshape(rows, repeats) * 1.0
        means = counts @ z / repeats
        # draws of one repeat only have no spread, and say nothing
        with np.errstate(divide="ignore", invalid="ignore"):
            moved = 0.5 * np.log(means)
            pulls = (0.5 * weights / means) @ z.T
            square = np.einsum("br,br,br->b", counts, pulls, pulls) / repeats
            variance = (square - (weights.sum() / 2) ** 2) / (repeats - 1)
            t = np.abs(moved @ weights) / np.sqrt(variance)
            misfit = ((moved @ whitened.T) ** 2).sum(axis=1)
        parts.append((np.where(np.isfinite(t), t, np.inf), misfit))
    t, misfits = (np.concatenate(part) for part in zip(*parts, strict=True))
    return t, misfits


def misfit_p_value(misfit: float, resampled: Floats) -> float:
    """Chance of a larger misfit: a scaled chi-square with the resampled mean and variance."""
    finite = resampled[np.isfinite(resampled)]
    mean, variance = float(finite.mean()), float(finite.var())
    return float(scipy.stats.chi2.sf(2 * misfit * mean / variance, 2 * mean**2 / variance))


def resample_clusters(sums: Floats, weights: Floats, seed: int) -> Floats:
    """weights @ y of clusters drawn with replacement; ``sums`` (clusters, points).

    A draw of clusters without any error has no logarithm and is left out.
    """
    drawn = np.random.default_rng(seed).integers(0, len(sums), size=(CLUSTER_RESAMPLES, len(sums)))
    with np.errstate(divide="ignore", invalid="ignore"):
        found = weights @ (0.5 * np.log(sums[drawn].sum(axis=1))).T
    return np.asarray(found[np.isfinite(found)])
