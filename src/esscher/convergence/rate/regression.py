"""Straight lines through correlated points: a covariance from the repeats, generalised least
squares, the bootstrap.

z is (repeats, points): the squared error of each repeat over its mean at each n, so every column
has mean 1. x is log n and y = log rms, so that y* - y = log(mean of z over resampled repeats) / 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.stats

from esscher.convergence.curve import Floats

__all__ = [
    "Line",
    "Resampled",
    "fit_line",
    "repeats_stderr",
    "resample",
    "resample_clusters",
    "working_covariance",
]

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
