"""The numerics of a fit: least squares with a covariance, the working covariance, the bootstrap."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
import scipy.stats

from esscher.errors.rate import fit_line, fit_rate, repeats_stderr, resample, working_covariance
from tests.errors.synthetic import Floats, ladder, noisy_curve, power, squared_errors


def test_generalised_least_squares_minimises_the_misfit() -> None:
    """Against a general-purpose minimiser of the quadratic form, for a covariance with
    correlations.
    """
    generator = np.random.default_rng(0)
    x, y = np.log(ladder(7).astype(float)), generator.standard_normal(7)
    factor = generator.standard_normal((7, 11))
    covariance = factor @ factor.T
    inverse = np.linalg.inv(covariance)

    def form(coefficients: Floats) -> float:
        residuals = y - np.polynomial.polynomial.polyval(x - x.mean(), coefficients)
        return float(residuals @ inverse @ residuals)

    line = fit_line(x, y, covariance)
    best = scipy.optimize.minimize(form, np.zeros(2), tol=1e-12)
    np.testing.assert_allclose([line.height, line.slope], best.x, atol=1e-6)
    assert line.misfit == pytest.approx(best.fun, rel=1e-9)
    variance = line.weights[1] @ covariance @ line.weights[1]
    assert line.variance == pytest.approx(variance, rel=1e-9)


def test_weighted_least_squares_agrees_with_polyfit() -> None:
    n, stderr = ladder(8), np.linspace(0.01, 0.2, 8)
    curve = noisy_curve(power(0.4), n, 0.1, 1)
    fit = fit_rate(replace(curve, stderr=stderr * curve.rms))
    (slope, height), covariance = np.polyfit(
        np.log(n), np.log(curve.rms), 1, w=1 / stderr, cov="unscaled"
    )
    assert fit.exponent == pytest.approx(-slope, rel=1e-10)
    assert fit.constant == pytest.approx(np.exp(height), rel=1e-10)
    assert fit.stderr == pytest.approx(np.sqrt(covariance[0, 0]), rel=1e-10)
    half_width = scipy.stats.norm.ppf(0.975) * fit.stderr
    assert fit.interval == pytest.approx(
        (fit.exponent - half_width, fit.exponent + half_width), rel=1e-10
    )
    residuals = np.log(curve.rms) - np.polyval([slope, height], np.log(n))
    chi2 = ((residuals / stderr) ** 2).sum()
    assert fit.p_value == pytest.approx(scipy.stats.chi2.sf(chi2, 6), rel=1e-9)


@pytest.mark.parametrize("nested", [False, True])
def test_working_covariance_finds_how_points_hang_together(nested: bool) -> None:
    """4000 repeats of 8 points: entries of cov(z) are 2 times n / m (nested) or the identity, each
    to about 0.1.

    False alarms: the loosest entry has standard error 0.12; 0.5 is more than 4 of them, for 36
    entries below 0.2 %.
    """
    n = ladder(8)
    x = np.log(n.astype(float))
    samples = squared_errors(np.random.default_rng(2), 4000, n, np.ones(8), dof=1, nested=nested)
    expected = 2 * np.exp(-np.abs(x[:, None] - x)) if nested else 2 * np.eye(8)
    found = working_covariance(x, samples / samples.mean(axis=0)) * 4 * 4000
    np.testing.assert_allclose(found, expected, atol=0.5)


def test_working_covariance_gives_way_to_repeats_that_contradict_it() -> None:
    """Neighbours with correlation -0.6, which the target cannot have, and variances that
    alternate.
    """
    generator = np.random.default_rng(3)
    normal = generator.standard_normal((200_000, 6))
    spread = np.array([0.1, 0.02, 0.1, 0.02, 0.1, 0.02])
    normal[:, 1::2] = -0.6 * normal[:, ::2] + 0.8 * normal[:, 1::2]
    expected = np.diag(spread**2)
    for i in range(0, 6, 2):
        expected[i, i + 1] = expected[i + 1, i] = -0.6 * spread[i] * spread[i + 1]
    found = working_covariance(np.arange(1.0, 7.0), 1 + spread * normal) * 4 * 200_000
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("repeats", [2, 3, 8])
def test_working_covariance_is_definite_with_fewer_repeats_than_points(repeats: int) -> None:
    n = ladder(12)
    for seed in range(20):
        z = squared_errors(np.random.default_rng(seed), repeats, n, np.ones(12), dof=1, nested=True)
        assert (
            np.linalg.eigvalsh(
                working_covariance(np.log(n.astype(float)), z / z.mean(axis=0))
            ).min()
            > 0
        )


def test_bootstrap_against_a_plain_loop() -> None:
    """One resample at a time, statistics written out; 1999 draws against 4000, each about 1.5 %
    off.
    """
    n, repeats = ladder(6), 12
    x = np.log(n.astype(float))
    generator = np.random.default_rng(4)
    samples = squared_errors(generator, repeats, n, n**-0.5, dof=2, nested=True)
    z = samples / samples.mean(axis=0)
    covariance = working_covariance(x, z)
    line = fit_line(x, 0.5 * np.log(samples.mean(axis=0)), covariance)
    contrast = line.weights[1]
    drawn_t, drawn_misfit = resample(z, line, seed=0)
    t, misfit = [], []
    for _ in range(4000):
        again = samples[generator.integers(repeats, size=repeats)]
        logs = 0.5 * np.log(again.mean(axis=0))
        pulls = (again / again.mean(axis=0)) @ contrast / 2
        shift = logs - 0.5 * np.log(samples.mean(axis=0))
        t.append(abs(contrast @ shift) / (pulls.std(ddof=1) / np.sqrt(repeats)))
        misfit.append(fit_line(x, shift, covariance).misfit * repeats / (repeats - 1))
    assert np.quantile(drawn_t, 0.95) == pytest.approx(np.quantile(t, 0.95), rel=0.05)
    assert drawn_misfit.mean() == pytest.approx(np.mean(misfit), rel=0.06)
    left_out = [
        contrast @ (0.5 * np.log(np.delete(z, i, axis=0).mean(axis=0))) for i in range(repeats)
    ]
    jackknife = np.sqrt((repeats - 1) / repeats * ((left_out - np.mean(left_out)) ** 2).sum())
    assert repeats_stderr(z, contrast) == pytest.approx(jackknife, rel=0.1)
