"""From an error curve to its rate: error ~ constant * n^-exponent, with an interval, a window and a
status that say why.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.special
import scipy.stats

from esscher.errors.curve import ErrorCurve, Floats
from esscher.inputs import as_count, as_kind, as_positive
from esscher.intervals import t_quantile

RESAMPLES = 1999
CLUSTER_RESAMPLES = 400  # a percentile interval needs fewer than percentile-t
BLOCK = 1 << 17  # numbers held at once while resampling
NO_SPREAD = 1e-13  # standard errors below this are rounding: the repeats differ by a factor only
PER_POINT = 10  # repeats per point below which the sample covariance has no say
# correlations of neighbours among which the working one is looked for
TIES = np.geomspace(1e-3, 0.999, 40)
FLOORS = np.linspace(0.0, 0.9, 10)  # and correlations of points far apart


@dataclass(frozen=True)
class Line:
    """A polynomial in x - mean(x) fitted by generalised least squares; every coefficient is linear
    in y.
    """

    coefficients: Floats  # ascending powers
    weights: Floats  # coefficients = weights @ y
    variance: Floats  # of each coefficient, if the covariance given is the true one
    residuals: Floats
    misfit: float  # residuals^T covariance^-1 residuals
    # matrix that takes y to the whitened residuals, whose squares sum to the misfit
    whitened: Floats

    def constant(self, x: Floats) -> float:
        """exp of a straight line's height at x = 0."""
        return float(np.exp(self.coefficients[0] - self.coefficients[1] * x.mean()))


def fit_line(x: Floats, y: Floats, covariance: Floats, degree: int = 1) -> Line:
    """The polynomial p of a degree that makes (y - p(x))^T covariance^-1 (y - p(x)) smallest
    (Aitken 1936).
    """
    powers = np.vander(x - x.mean(), degree + 1, increasing=True)
    root = np.linalg.cholesky(covariance)
    inverse = np.linalg.pinv(np.linalg.solve(root, powers))
    weights = np.linalg.solve(root.T, inverse.T).T
    residual_maker = np.eye(x.size) - powers @ weights
    whitened = np.linalg.solve(root, residual_maker)
    misfit = float(((whitened @ y) ** 2).sum())
    return Line(
        weights @ y, weights, (inverse**2).sum(axis=1), residual_maker @ y, misfit, whitened
    )


def working_covariance(x: Floats, z: Floats) -> Floats:
    """Covariance of y = log(mean square) / 2 by the delta method, steadied for repeats that are
    few:

        cov / (4 repeats),   cov = (1 - share) sample + share target,
        target_ij = sqrt(d_i d_j) (floor + (1 - floor) rho^(|x_i - x_j| / mean gap)),
        log d linear in x.

    The sample covariance alone must not weigh the points: with 20 repeats of 8 points its inverse
    finds weights that suit the noise, and 95 % intervals cover 69 to 83 %. The target has what
    prefixes of one sample obey (for a mean of n tokens, squared errors at n < m have correlation n
    / m), what independent points obey (rho = floor = 0), and what repeats with a factor of their
    own obey (floor > 0). ``share`` has the smallest expected squared error (Ledoit and Wolf 2004,
    in the form of Schaefer and Strimmer 2005), but is at least PER_POINT points / repeats: weights
    that adapt less than the optimum cost little width, those that adapt more cost coverage.
    Intervals and tests do not rest on this covariance: the repeats themselves tell the variance of
    what it weighs (a working covariance, Liang and Zeger 1986).
    """
    repeats = z.shape[0]
    centred = z - z.mean(axis=0)
    sample = centred.T @ centred / (repeats - 1)
    target = _decaying(x, sample)
    squares = (centred**2).T @ centred**2 - sample**2 * (repeats - 1) ** 2 / repeats
    noise = squares * repeats / (repeats - 1) ** 3
    apart = float(((sample - target) ** 2).sum())
    share = (
        min(1.0, max(float(noise.sum()) / apart, PER_POINT * x.size / repeats))
        if apart > 0
        else 1.0
    )
    return np.asarray(((1 - share) * sample + share * target) / (4 * repeats))


def _decaying(x: Floats, sample: Floats) -> Floats:
    """The covariance with log-linear variances and correlation decaying with |x_i - x_j| that is
    nearest to the sample's.
    """
    variances = np.diag(sample)
    trend = np.polynomial.Polynomial.fit(x, np.log(variances), 1)
    smooth = np.exp(trend(x))
    smooth *= variances.sum() / smooth.sum()
    gaps = np.abs(x[:, None] - x[None, :]) / np.abs(np.diff(x)).mean()
    rows, columns = np.triu_indices(x.size, 1)
    seen = sample[rows, columns] / np.sqrt(variances[rows] * variances[columns])
    tried = (
        FLOORS[:, None, None] + (1 - FLOORS[:, None, None]) * TIES[:, None] ** gaps[rows, columns]
    )
    floor, tie = np.unravel_index(((tried - seen) ** 2).sum(axis=2).argmin(), tried.shape[:2])
    correlation = FLOORS[floor] + (1 - FLOORS[floor]) * TIES[tie] ** gaps
    return np.asarray(np.sqrt(np.outer(smooth, smooth)) * correlation)


@dataclass(frozen=True)
class Resampled:
    """What resampling the repeats says of contrasts of y and of the misfit of a line."""

    stderr: Floats  # of each contrast, by the delta method from the repeats, (contrasts,)
    t: Floats  # |contrast* - contrast| / stderr*, (contrasts, resamples)
    misfit: Floats  # misfit of a straight line were the truth straight, (resamples,)

    def half_width(self, contrast: int, level: float) -> float:
        """Half the width of the symmetric percentile-t interval (Hall 1988)."""
        if self.stderr[contrast] < NO_SPREAD:
            return 0.0
        return float(self.stderr[contrast] * np.quantile(self.t[contrast], level, method="higher"))

    def p_value(self, contrast: int, value: float) -> float:
        """Chance of a contrast so far from 0, were 0 the truth."""
        if self.stderr[contrast] < NO_SPREAD:
            return float("nan")
        beyond = int((self.t[contrast] >= abs(value) / self.stderr[contrast]).sum())
        return float((1 + beyond) / (1 + self.t.shape[1]))

    def misfit_p_value(self, misfit: float) -> float:
        """Chance of a larger misfit: the resampled ones give mean and variance of a scaled
        chi-square, which has tails.
        """
        finite = self.misfit[np.isfinite(self.misfit)]
        mean, variance = float(finite.mean()), float(finite.var())
        return float(scipy.stats.chi2.sf(2 * misfit * mean / variance, 2 * mean**2 / variance))


def repeats_stderr(z: Floats, contrasts: Floats) -> Floats:
    """Standard error of each contrast c of y by the delta method: repeat r moves c y by sum_i c_i
    (z_ri - 1) / 2.

    The spread of that over repeats counts the correlation between points.
    """
    return np.asarray((z @ contrasts.T / 2).std(axis=0, ddof=1) / np.sqrt(z.shape[0]))


def resample_clusters(sums: Floats, contrasts: Floats, seed: int) -> Floats:
    """Contrasts (rows, on y) of clusters drawn with replacement, (contrasts, resamples); ``sums``
    (clusters, points).

    A draw of clusters without any error has no logarithm and says nothing: it is left out.
    """
    drawn = np.random.default_rng(seed).integers(0, len(sums), size=(CLUSTER_RESAMPLES, len(sums)))
    with np.errstate(divide="ignore", invalid="ignore"):
        found = contrasts @ (0.5 * np.log(sums[drawn].sum(axis=1))).T
    return np.asarray(found[:, np.isfinite(found).all(axis=0)])


def resample(z: Floats, line: Line, contrasts: Floats, seed: int) -> Resampled:
    """Draw repeats with replacement; the weights of ``line`` and of the ``contrasts`` (rows, on y)
    stay as they are.
    """
    repeats = z.shape[0]
    generator = np.random.default_rng(seed)
    # a bootstrap of r repeats has (r - 1) / r of the variance
    whitened = line.whitened * np.sqrt(repeats / (repeats - 1))
    stderr = repeats_stderr(z, contrasts)
    size = max(1, BLOCK // repeats)
    sizes = [min(size, RESAMPLES - start) for start in range(0, RESAMPLES, size)]
    blocks = [_resample_block(z, contrasts, whitened, generator, size) for size in sizes]
    t, misfit = (np.concatenate(parts, axis=-1) for parts in zip(*blocks, strict=True))
    return Resampled(stderr, t, misfit)


def _resample_block(
    z: Floats, contrasts: Floats, whitened: Floats, generator: np.random.Generator, size: int
) -> tuple[Floats, Floats]:
    repeats = z.shape[0]
    draws = generator.integers(repeats, size=(size, repeats)) + repeats * np.arange(size)[:, None]
    counts = (
        np.bincount(draws.ravel(), minlength=size * repeats)
        .reshape(size, repeats)
        .astype(np.float64)
    )
    means = counts @ z / repeats
    t = np.empty((contrasts.shape[0], size))
    # draws of one repeat only have no spread, and say nothing
    with np.errstate(divide="ignore", invalid="ignore"):
        moved = 0.5 * np.log(means)
        for i, contrast in enumerate(contrasts):
            pulls = (0.5 * contrast / means) @ z.T
            mean = contrast.sum() / 2  # of the pulls, over any draw
            variance = (np.einsum("br,br,br->b", counts, pulls, pulls) / repeats - mean**2) / (
                repeats - 1
            )
            t[i] = np.abs(moved @ contrast) / np.sqrt(variance)
        misfit = ((moved @ whitened.T) ** 2).sum(axis=1)
    t[~np.isfinite(t)] = np.inf
    return t, misfit


# ---- RateFit: what a fit of error ~ constant * n^-exponent found, how sure it is, and what it
# could not say.


@dataclass(frozen=True)
class Status:
    """A short code, and a text with the cause and the remedy.

    Fitted: "ok", "exact", "curved", "few_repeats", "heavy_tail", "no_stderr". Not fitted
    (``failed``): "too_few_points", "rounding", "noisy", "invalid", "repeated_n".
    """

    code: str
    text: str
    failed: bool = False


@dataclass(frozen=True)
class Window:
    """The points fitted: their smallest and largest n, their number, and the rule that chose
    them.
    """

    n_min: int
    n_max: int
    points: int
    rule: str


@dataclass(frozen=True)
class Curvature:
    """c in log rms = a + b log n + c (log n)^2; away from 0, one power law is not enough."""

    coefficient: float
    stderr: float  # 0 where exact
    p_value: float  # of c = 0; NaN where there is no sampling error to compare with


@dataclass(frozen=True)
class LawComparison:
    """n^-exponent against (log n)^-gamma on the same points; both laws have two parameters, so AIC
    compares likelihoods.
    """

    gamma: float
    constant: float  # error ~ constant * (log n)^-gamma
    log_likelihood_difference: float  # power law minus logarithmic law
    weight_power: float  # AIC weights: they sum to 1
    weight_logarithmic: float
    preferred: str  # "power", "logarithmic" or "undecided"
    text: str


@dataclass(frozen=True, repr=False)
class RateFit:
    """error ~ ``constant`` * n^-``exponent``.

    ``interval``: for the exponent, at ``level``; of an exact curve the range of its local slopes
    instead, whatever the level. ``local_slopes``: d log rms / d log n at each n (near -exponent),
    analytic where the curve has them, else differences. ``residuals``: log rms minus the line.
    ``chi2``: residuals^T covariance^-1 residuals, near its ``dof`` when the points are straight,
    and ``p_value`` the chance of a larger one; NaN where there is no sampling error to compare
    with.
    """

    exponent: float
    constant: float
    interval: tuple[float, float]
    level: float
    window: Window
    status: Status
    stderr: float
    n: npt.NDArray[np.int64]
    residuals: Floats
    local_slopes: Floats
    curvature: Curvature
    power_vs_log: LawComparison | None  # None with fewer than three points at n >= 2
    chi2: float
    dof: int
    p_value: float

    def predict(self, n: Any) -> Floats:
        """The fitted error at n."""
        return np.asarray(self.constant * np.asarray(n, dtype=np.float64) ** -self.exponent)

    def with_exponent(self, exponent: float, low: float, high: float, source: str) -> RateFit:
        """The same points under an exponent and interval from elsewhere; the line keeps its height
        in the middle of log n.
        """
        middle = np.exp(np.log(self.n.astype(np.float64)).mean()) if self.n.size else np.nan
        constant = float(self.predict(middle) * middle**exponent)
        status = replace(self.status, text=source)
        return replace(
            self, exponent=exponent, constant=constant, interval=(low, high), status=status
        )

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
    """No rate can be given; ``fit`` has what there is of it, and its status the cause and the
    remedy.
    """

    def __init__(self, fit: RateFit) -> None:
        super().__init__(f"curve: {fit.status.text}")
        self.fit = fit


# ---- Which points of a curve a rate is fitted to, what is known of their sampling error, and
# when there is nothing to fit.

ROUNDING = 1e-12  # of the limit's size: errors below it are rounding, not attention
DISAGREEMENT = 1e-3  # relative difference of rms from the samples' that is taken for rounding
INACCURATE = 1 / 3  # relative accuracy of the errors from which on they are rounding altogether
NOISY = 0.5  # standard error over error from which on a point says nothing


@dataclass(frozen=True)
class Points:
    """The points of a fit, by increasing n, and what is known of their sampling error."""

    n: npt.NDArray[np.int64]
    y: Floats  # log rms
    evidence: str  # "exact", "queries", "repeats", "stderr" or "none"
    stderr: Floats  # of y
    z: Floats | None  # squared errors over their mean, (repeats, points)
    # squared errors summed over the queries of each cluster, (clusters, points)
    clusters: Floats | None
    slope: Floats | None  # analytic d log rms / d log n
    accuracy: float

    @property
    def x(self) -> Floats:
        return np.log(self.n.astype(np.float64))

    def only(self, kept: Any) -> Points:
        z = None if self.z is None else self.z[:, kept]
        clusters = None if self.clusters is None else self.clusters[:, kept]
        slope = None if self.slope is None else self.slope[kept]
        part = replace(self, n=self.n[kept], y=self.y[kept], stderr=self.stderr[kept])
        return replace(part, z=z, clusters=clusters, slope=slope)

    def covariance(self) -> Floats:
        """Of y; the identity where nothing is known."""
        if self.z is not None:
            return working_covariance(self.x, self.z)
        return np.diag(self.stderr**2) if self.evidence == "stderr" else np.eye(self.n.size)

    def line(self, degree: int = 1) -> Line:
        """The one line of every rate: y against x, weighted with what is known of its
        covariance.
        """
        return fit_line(self.x, self.y, self.covariance(), degree)

    def local_slopes(self) -> Floats:
        if self.slope is not None and np.isfinite(self.slope).all():
            return self.slope
        return (
            np.asarray(np.gradient(self.y, self.x))
            if self.n.size > 1
            else np.full(self.n.size, np.nan)
        )


def as_window(window: Any) -> tuple[float, float] | None:
    """None for "auto"; otherwise both ends, checked."""
    if isinstance(window, str) and window == "auto":
        return None
    try:
        low, high = (as_positive(end, "window") for end in window)
    except (TypeError, ValueError) as cause:
        raise ValueError(f'window: expected "auto" or (n_min, n_max), got {window!r}') from cause
    if low >= high:
        raise ValueError(f"window: expected n_min < n_max, got {window!r}")
    return low, high


def select_points(
    curve: ErrorCurve, limits: tuple[float, float] | None
) -> tuple[Points, Window, Status | None]:
    """The usable points, the window with the rule that chose it, and what forbids a fit if anything
    does.
    """
    as_kind(curve, ErrorCurve, "curve")
    shape = (0, curve.n.size) if curve.samples is None else curve.samples.shape
    if len(shape) != 2 or shape[1] != curve.n.size:
        raise ValueError(
            f"curve.samples: expected squared errors, (repeats, {curve.n.size}), got shape {shape}"
        )
    low, high = limits or (-math.inf, math.inf)
    order = np.argsort(curve.n, kind="stable")
    order = order[(curve.n[order] >= low) & (curve.n[order] <= high)]
    rule = "all points" if limits is None else f"points with n from {low:g} to {high:g}, as given"
    problem = _nonsense(curve, order)
    usable = order
    if problem is None:
        scale = (
            curve.scale
            if math.isfinite(curve.scale) and curve.scale > 0
            else float(curve.rms[order].max(initial=0.0))
        )
        rounding = curve.rms[order] <= ROUNDING * scale
        noisy = ~rounding & (curve.stderr[order] > NOISY * curve.rms[order])
        usable = order[~rounding & ~noisy]
        for dropped, why in (
            (rounding, "error is at rounding level"),
            (noisy, "standard error exceeds half the error"),
        ):
            if dropped.any():
                rule += (
                    f", without the {int(dropped.sum())} whose {why} (n ="
                    f" {_listed(curve.n[order][dropped])})"
                )
        if usable.size < 3:
            problem = _too_few(usable.size, int(rounding.sum()), int(noisy.sum()))
    ends = (int(curve.n[usable].min()), int(curve.n[usable].max())) if usable.size else (0, 0)
    return _points(curve, usable), Window(*ends, points=int(usable.size), rule=rule), problem


def _too_few(usable: int, rounding: int, noisy: int) -> Status:
    have = (
        f"{usable} usable point{'' if usable == 1 else 's'}, where a rate and the test of it need 3"
    )
    if rounding:
        return Status(
            "rounding",
            f"the error is at rounding level at {rounding} points; {have}: give smaller n",
            True,
        )
    if noisy:
        text = (
            f"the standard error exceeds half the error at {noisy} points; {have}: give more"
            " repeats"
        )
        return Status("noisy", text, True)
    return Status("too_few_points", f"{have}: give a longer ladder of n or a wider window", True)


def _nonsense(curve: ErrorCurve, order: npt.NDArray[np.int64]) -> Status | None:
    """What makes logarithms or weights meaningless."""
    n, rms, stderr = curve.n[order], curve.rms[order], curve.stderr[order]
    if curve.accuracy >= INACCURATE:
        text = (
            f"the errors are only known to {curve.accuracy:.2g} of themselves: compute the curve"
            " more accurately"
        )
        return Status("rounding", text, True)
    bad = ~np.isfinite(rms) | (rms <= 0) | (n < 1)
    if bad.any():
        return Status(
            "invalid",
            f"the error is {rms[bad][0]} at n = {n[bad][0]}, where a rate needs finite errors above"
            " 0: leave that n out with window=(n_min, n_max), or compute the error anew",
            True,
        )
    if np.unique(n).size < n.size:
        return Status(
            "repeated_n", f"n repeats ({_listed(n)}): put all repeats at one n into one point", True
        )
    known = np.isfinite(stderr) & (stderr > 0)
    if known.any() and not known.all():
        text = (
            "stderr is 0, negative or NaN at some points only: give every point its own, or leave"
            " points out by window"
        )
        return Status("invalid", text, True)
    return None if curve.samples is None else _disagreement(curve.samples, order, n, rms)


def _disagreement(
    samples: Floats, order: npt.NDArray[np.int64], n: npt.NDArray[np.int64], rms: Floats
) -> Status | None:
    """Repeats that the errors are not the root mean square of."""
    with np.errstate(invalid="ignore"):
        root = np.sqrt(samples[:, order].mean(axis=0))
        off = ~(np.abs(root - rms) <= DISAGREEMENT * rms)
    if not off.any():
        return None
    text = (
        f"rms is {rms[off][0]:.6g} at n = {n[off][0]} but the root mean square of the samples"
        f" {root[off][0]:.6g}"
    )
    return Status("invalid", text + ": samples must be the squared errors of the repeats", True)


def _points(curve: ErrorCurve, usable: npt.NDArray[np.int64]) -> Points:
    rms, stderr = curve.rms[usable], curve.stderr[usable]
    z = None
    if curve.samples is not None and curve.samples.shape[0] > 1 and usable.size:
        samples = curve.samples[:, usable]
        if (samples.std(axis=0) > 0).all():
            z = samples / samples.mean(axis=0)
    clusters = _clustered(curve, usable)
    if clusters is not None:
        evidence = "queries"
    elif z is not None:
        evidence = "repeats"
    elif usable.size and (stderr > 0).all():
        evidence = "stderr"
    else:
        evidence = "none" if curve.kind == "montecarlo" else "exact"
    slope = None if curve.slope is None else curve.slope[usable]
    # nonsense is refused, with what there is of a fit
    with np.errstate(divide="ignore", invalid="ignore"):
        y, relative = np.log(rms), stderr / rms
    return Points(curve.n[usable], y, evidence, relative, z, clusters, slope, curve.accuracy)


def _clustered(curve: ErrorCurve, usable: npt.NDArray[np.int64]) -> Floats | None:
    """Squared errors summed over the queries of each cluster; None where clusters are not known, or
    all queries are of one.
    """
    if curve.queries is None or curve.queries.clusters is None:
        return None
    groups = np.unique(curve.queries.clusters, return_inverse=True)[1]
    sums = [np.bincount(groups, column) for column in curve.queries.mse[:, usable].T]
    return np.stack(sums, axis=1) if sums and groups.max() > 0 else None


def _listed(n: npt.NDArray[np.int64]) -> str:
    shown = ", ".join(str(int(value)) for value in n[:5])
    return shown + (", ..." if n.size > 5 else "")


# ---- From an error curve to its rate: error ~ constant * n^-exponent, with an interval, a window
# and a status that say why.

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
