"""fit_rate: the exponent of error ~ constant * n^-exponent, with an interval and a status."""

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

Counts = npt.NDArray[np.int64]
NAN = float("nan")

# which points are fitted
ROUNDING = 1e-12  # of the limit's size: smaller errors are rounding
NOISY = 0.5  # standard error over error above which a point is left out
INACCURATE = 1 / 3  # relative accuracy of a curve above which nothing is fitted
DISAGREEMENT = 1e-3  # relative difference between rms and its samples that is taken for rounding
# what the fit says
CURVED = 1e-3  # level at which one power law is rejected
HEAVY = 0.5  # share of one repeat in a mean square that is reported as a heavy tail
GAMMA = 2.0  # largest power of 1 / log n taken for a law; hardmax has 1/2 [B, Proposition 5.1]
PREFERRED = 0.95  # AIC weight from which on a law is preferred
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

    Fitted: "ok", "exact", "curved", "few_repeats", "heavy_tail", "no_stderr". Not fitted
    (``failed``): "too_few_points", "rounding", "noisy", "invalid", "repeated_n".
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


@dataclass(frozen=True)
class LawComparison:
    """n^-exponent against (log n)^-gamma on the same points, by their AIC weights."""

    gamma: float
    log_likelihood_difference: float  # power law minus logarithmic law
    weight_power: float  # AIC weight; the logarithmic law has the rest of 1
    preferred: str  # "power", "logarithmic" or "undecided"


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
    power_vs_log: LawComparison | None  # None with fewer than three points at n >= 2
    p_value: float

    def with_exponent(self, exponent: float, low: float, high: float, source: str) -> RateFit:
        """The same points with a given exponent and interval; the line keeps its mean height."""
        middle = np.exp(np.log(self.n.astype(np.float64)).mean()) if self.n.size else np.nan
        return replace(
            self,
            exponent=exponent,
            constant=float(self.constant * middle ** (exponent - self.exponent)),
            interval=(low, high),
            status=replace(self.status, text=source),
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
    - neither: least squares, Student's interval from the scatter about the line;
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
    usable, rule, problem = _usable(as_kind(curve, ErrorCurve, "curve"), window)
    points = _Points.of(curve, usable)
    ends = (int(points.n[0]), int(points.n[-1])) if usable.size else (0, 0)
    chosen = Window(*ends, points=int(usable.size), rule=rule)
    if problem is None:
        return _fit(points, chosen, level, seed)
    # a least-squares line where two points allow one, without an interval
    exponent = constant = NAN
    slopes = np.full(usable.size, np.nan)
    if usable.size > 1 and (np.diff(points.n) > 0).all() and np.isfinite(points.y).all():
        line = fit_line(points.x, points.y, np.eye(usable.size))
        exponent, constant, slopes = -line.slope, line.constant(points.x), points.local_slopes()
    nothing = (NAN, NAN)
    fit = RateFit(
        exponent, constant, nothing, level, chosen, problem, NAN, points.n, slopes, None, NAN
    )
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
    shape = (0, curve.n.size) if curve.samples is None else curve.samples.shape
    if len(shape) != 2 or shape[1] != curve.n.size:
        raise ValueError(
            f"curve.samples: expected squared errors, (repeats, {curve.n.size}), got shape {shape}"
        )
    order = np.argsort(curve.n, kind="stable")
    order = order[(curve.n[order] >= low) & (curve.n[order] <= high)]
    problem = _invalid(curve, order)
    if problem is not None:
        return order, rule, problem
    n, rms = curve.n[order], curve.rms[order]
    known = math.isfinite(curve.scale) and curve.scale > 0
    rounding = rms <= ROUNDING * (curve.scale if known else float(rms.max(initial=0.0)))
    noisy = ~rounding & (curve.stderr[order] > NOISY * rms)
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


def _invalid(curve: ErrorCurve, order: Counts) -> Status | None:
    """What makes logarithms or weights of a curve meaningless."""
    n, rms, stderr = curve.n[order], curve.rms[order], curve.stderr[order]
    bad = ~np.isfinite(rms) | (rms <= 0) | (n < 1)
    known = np.isfinite(stderr) & (stderr > 0)
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
    elif np.unique(n).size < n.size:
        code = "repeated_n"
        text = f"n repeats ({_listed(n)}): put all repeats at one n into one point"
    elif known.any() and not known.all():
        text = (
            "stderr is 0, negative or NaN at some points only: give every point its own, or leave"
            " points out by window"
        )
    elif curve.samples is not None:
        with np.errstate(invalid="ignore"):
            root = np.sqrt(curve.samples[:, order].mean(axis=0))
            off = ~(np.abs(root - rms) <= DISAGREEMENT * rms)
        if off.any():
            text = (
                f"rms is {rms[off][0]:.6g} at n = {n[off][0]} but the root mean square of the"
                f" samples {root[off][0]:.6g}: samples must be the squared errors of the repeats"
            )
    return Status(code, text, True) if text else None


def _listed(n: Counts) -> str:
    return ", ".join(map(str, n[:5].tolist())) + (", ..." if n.size > 5 else "")


@dataclass(frozen=True)
class _Points:
    """The points of a fit, by increasing n, and what is known of their sampling error."""

    n: Counts
    y: Floats  # log rms
    stderr: Floats | None  # of y, where it is known and there are no repeats
    z: Floats | None  # squared errors over their mean, (repeats, points)
    clusters: Floats | None  # squared errors summed over each cluster's queries, (clusters, points)
    sampled: bool
    slope: Floats | None  # analytic d log rms / d log n
    accuracy: float

    @classmethod
    def of(cls, curve: ErrorCurve, usable: Counts) -> _Points:
        rms, stderr = curve.rms[usable], curve.stderr[usable]
        z: Floats | None = None
        clusters: Floats | None = None
        if curve.samples is not None and len(curve.samples) > 1 and usable.size:
            samples = curve.samples[:, usable]
            if (samples.std(axis=0) > 0).all():
                z = samples / samples.mean(axis=0)
        if curve.queries is not None and curve.queries.clusters is not None and usable.size:
            groups = np.unique(curve.queries.clusters, return_inverse=True)[1]
            if groups.max() > 0:
                columns = curve.queries.mse[:, usable].T
                clusters = np.stack([np.bincount(groups, column) for column in columns], axis=1)
        # invalid curves are refused, with what there is of a fit
        with np.errstate(divide="ignore", invalid="ignore"):
            y, relative = np.log(rms), stderr / rms
        known = z is None and clusters is None and usable.size > 0 and bool((stderr > 0).all())
        return cls(
            n=curve.n[usable],
            y=y,
            stderr=relative if known else None,
            z=z,
            clusters=clusters,
            sampled=curve.kind == "montecarlo",
            slope=None if curve.slope is None else curve.slope[usable],
            accuracy=curve.accuracy,
        )

    @property
    def x(self) -> Floats:
        return np.log(self.n.astype(np.float64))

    def covariance(self) -> Floats:
        """Of y; the identity where nothing is known."""
        if self.z is not None:
            return working_covariance(self.x, self.z)
        return np.eye(self.n.size) if self.stderr is None else np.diag(self.stderr**2)

    def local_slopes(self) -> Floats:
        if self.slope is not None and np.isfinite(self.slope).all():
            return self.slope
        if self.n.size < 2:
            return np.full(self.n.size, np.nan)
        return np.asarray(np.gradient(self.y, self.x))


# ---- The line, its interval and its status.


def _fit(points: _Points, chosen: Window, level: float, seed: int) -> RateFit:
    line = fit_line(points.x, points.y, points.covariance())
    exponent, weights, slopes = -line.slope, line.weights[1], points.local_slopes()
    dof, p_value, notes = points.n.size - 2, NAN, list[tuple[str, str]]()
    source = "standard errors, points taken as independent"
    if points.clusters is not None:
        drawn = -resample_clusters(points.clusters, weights, seed)
        stderr = float(drawn.std())
        low, high = (float(np.quantile(drawn, (1 + side * level) / 2)) for side in (-1, 1))
        source = f"bootstrap over {len(points.clusters)} clusters of queries"
        notes.append(("exact", f"exact at each query; interval from the {source}"))
    elif points.z is None and points.stderr is None and not points.sampled:
        stderr, margin = 0.0, points.accuracy * float(np.abs(weights).sum())
        between = np.concatenate([slopes, np.diff(points.y) / np.diff(points.x)])
        low, high = -float(between.max()) - margin, -float(between.min()) + margin
        text = (
            "exact curve: no sampling error; the interval is the range of local slopes over the"
            " window"
        )
        notes.append(("exact", text))
    else:
        if points.z is not None:
            repeats, stderr = len(points.z), repeats_stderr(points.z, weights)
            source = f"bootstrap over {repeats} repeats"
            reach = t_quantile(repeats - 1, level)
            if repeats >= FEW:
                t, misfits = resample(points.z, line, seed)
                reach = float(np.quantile(t, level, method="higher"))
                reach = reach if stderr >= NO_SPREAD else 0.0
                p_value = misfit_p_value(line.misfit, misfits)
        elif points.stderr is not None:
            stderr = math.sqrt(line.variance)
            reach = float(scipy.stats.norm.ppf((1 + level) / 2))
            p_value = float(scipy.stats.chi2.sf(line.misfit, dof))
        else:
            stderr = math.sqrt(line.misfit / dof * line.variance)
            reach = t_quantile(dof, level)
            text = (
                "no standard errors: the scatter about the line stands for them; give repeats to"
                " test straightness"
            )
            notes.append(("no_stderr", text))
        low, high = exponent - stderr * reach, exponent + stderr * reach
    straight = f"straightness {f'p = {p_value:.2g}' if p_value >= 1e-6 else 'p < 1e-6'}"
    if p_value < CURVED:
        text = (
            f"one power law does not fit ({straight}): the exponent is an average of local slopes"
            f" from {slopes[0]:.3g} at n = {points.n[0]} to {slopes[-1]:.3g} at n ="
            f" {points.n[-1]}; give larger n or a window, or read power_vs_log and local_slopes"
        )
        notes.append(("curved", text))
    if points.z is not None:
        repeats, share = len(points.z), points.z.max(axis=0) / len(points.z)
        if repeats < FEW:
            text = (
                f"{repeats} repeats: Student's interval, too short where errors are skew; give at"
                " least 20 repeats"
            )
            notes.append(("few_repeats", text))
        elif share.max() > HEAVY:
            text = (
                f"heavy tails: one repeat makes {share.max():.0%} of the mean square at n ="
                f" {points.n[share.argmax()]}, so the exponent may be biased and the interval too"
                " short; give more repeats"
            )
            notes.append(("heavy_tail", text))
    notes = notes or [("ok", f"one power law fits ({straight}); interval from {source}")]
    return RateFit(
        exponent=exponent,
        constant=line.constant(points.x),
        interval=(low, high),
        level=level,
        window=chosen,
        status=Status(notes[0][0], "; ".join(text for _, text in notes)),
        stderr=stderr,
        n=points.n,
        local_slopes=slopes,
        power_vs_log=_compare_laws(points),
        p_value=p_value,
    )


def _compare_laws(points: _Points) -> LawComparison | None:
    """The same least squares on log n and on log log n, at n >= 2, by their largest Gaussian log
    likelihoods. Of a line with misfit Q, up to what both share:

    - standard errors known: -Q / 2;
    - repeats, covariance maximised over: -(repeats / 2) log(1 + Q / (repeats - 1));
    - scatter unknown, or an exact curve: -(points / 2) log(Q / points).
    """
    kept = points.n >= 2
    z = None if points.z is None else points.z[:, kept]
    stderr = None if points.stderr is None else points.stderr[kept]
    points = replace(points, n=points.n[kept], y=points.y[kept], z=z, stderr=stderr)
    size = int(points.n.size)
    if size < 3:
        return None

    def log_likelihood(misfit: float) -> float:
        if z is not None:
            return -0.5 * len(z) * math.log1p(misfit / (len(z) - 1))
        if stderr is not None:
            return -misfit / 2
        return -0.5 * size * math.log(misfit / size + max(points.accuracy, 1e-14) ** 2)

    covariance = points.covariance()
    power = fit_line(points.x, points.y, covariance)
    log = fit_line(np.log(points.x), points.y, covariance)
    gain = log_likelihood(power.misfit) - log_likelihood(log.misfit)
    weight = float(scipy.special.expit(gain))
    preferred = "undecided"
    if weight >= PREFERRED:
        preferred = "power"
    elif weight <= 1 - PREFERRED and -log.slope <= GAMMA:  # a faster one is a curve that bends
        preferred = "logarithmic"
    return LawComparison(-log.slope, gain, weight, preferred)


# ---- Generalised least squares.


@dataclass(frozen=True)
class Line:
    """A straight line in x - mean(x) fitted by generalised least squares, linear in y."""

    height: float  # at mean(x)
    slope: float
    weights: Floats  # (height, slope) = weights @ y
    variance: float  # of the slope, if the covariance given is the true one
    misfit: float  # residuals^T covariance^-1 residuals
    whitened: Floats  # takes y to the whitened residuals, whose squares sum to the misfit

    def constant(self, x: Floats) -> float:
        """exp of the line's height at x = 0."""
        return float(np.exp(self.height - self.slope * x.mean()))


def fit_line(x: Floats, y: Floats, covariance: Floats) -> Line:
    """The line that makes (y - line(x))^T covariance^-1 (y - line(x)) smallest (Aitken 1936)."""
    powers = np.vander(x - x.mean(), 2, increasing=True)
    root = np.linalg.cholesky(covariance)
    inverse = np.linalg.pinv(np.linalg.solve(root, powers))
    weights = np.linalg.solve(root.T, inverse.T).T
    whitened = np.linalg.solve(root, np.eye(x.size) - powers @ weights)
    height, slope = weights @ y
    variance, misfit = (inverse[1] ** 2).sum(), ((whitened @ y) ** 2).sum()
    return Line(float(height), float(slope), weights, float(variance), float(misfit), whitened)


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
