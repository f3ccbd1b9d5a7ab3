"""Heuristic exponents: their own minimisation, and the mean square error at very large n that they
describe.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp, ndtr, ndtri
from scipy.stats import chi2

import esscher as es
from esscher.errors.gaussian import gaussian_error
from esscher.theory import bohbot, sharp

C = np.linspace(1e-3, 1 - 1e-9, 400_001)


def rms_rate(c: np.ndarray) -> np.ndarray:
    return np.where(c < 3**-0.5, 1 - 2 * c**2, (1 - c**2) ** 2 / (4 * c**2))


def typical_rate(c: np.ndarray) -> np.ndarray:
    return np.where(c < 0.5, 1 - 2 * c**2, 2 * (1 - c) ** 2)


@pytest.mark.parametrize("h", [0.1, 0.6, math.sqrt(0.5), 0.9, 1.0, 1.5, 2.0, 3.0, 10.0])
def test_exponents_are_minima_over_queries(h: float) -> None:
    """Half of min over c of (rate of the squared error) + c^2/h^2; 2 c^2/h^2 where queries are
    averaged first.
    """
    assert sharp.l2_exponent_rms(h) == pytest.approx(
        min(0.5, (rms_rate(C) + C**2 / h**2).min() / 2), abs=1e-6
    )
    assert sharp.l2_exponent_typical(h) == pytest.approx(
        min(0.5, (typical_rate(C) + C**2 / h**2).min() / 2), abs=1e-6
    )
    assert sharp.moment_exponent_rms(h) == pytest.approx(
        min(0.5, (rms_rate(C) + 2 * C**2 / h**2).min() / 2), abs=1e-6
    )
    typical = min(0.5, (typical_rate(C) + 2 * C**2 / h**2).min() / 2)
    assert sharp.moment_exponent_typical(h) == pytest.approx(typical, abs=1e-6)
    assert sharp.l2_exponent_rms(h) <= sharp.l2_exponent_typical(h)
    assert sharp.moment_exponent_rms(h) <= sharp.moment_exponent_typical(h)


def log_sum_p2(log_n: float, c: float) -> float:
    """log E sum_j p_j^2 at s = c sqrt(2 log n) for n = exp(log_n) as large as wished: Poisson form
    of the integral.

    n int t E[e^2 exp(-te)] exp(-n E(1 - exp(-te))) dt, in log t, e = exp(s g).
    """
    s = c * math.sqrt(2 * log_n)
    g = np.linspace(-2.5 * math.sqrt(2 * log_n) - 8, 2.5 * math.sqrt(2 * log_n) + 8, 3001)
    log_density = -0.5 * g**2 + math.log(g[1] - g[0]) - 0.5 * math.log(2 * math.pi)
    tau = np.linspace(-(2 + 2 * c * c) * log_n, 10.0, 801)
    u = tau[:, None] + s * g
    with np.errstate(over="ignore"):
        te = np.exp(np.minimum(u, 700.0))
    own = logsumexp(log_density + 2 * u - te, axis=1)
    with np.errstate(divide="ignore"):
        missing = np.where(u < -30, u, np.log(-np.expm1(-te)))
    exponent = np.exp(np.minimum(log_n + logsumexp(log_density + missing, axis=1), 700.0))
    return float(logsumexp(log_n + own - exponent) + math.log(tau[1] - tau[0]))


@pytest.mark.parametrize("c", [0.45, 0.7, 0.8])
def test_mean_square_follows_the_rare_draws(c: float) -> None:
    """Slope of E sum p_j^2 in log n at n = e^150, less the 1/(2 log n) of its prefactor: not the
    typical rate.
    """
    slope = -(log_sum_p2(153.0, c) - log_sum_p2(147.0, c)) / 6.0
    correction = 0.0 if c < 3**-0.5 else 1 / (2 * 150)
    assert slope - correction == pytest.approx(float(rms_rate(np.array(c))), abs=2e-3)
    if c > 0.5:
        assert abs(slope - correction - float(typical_rate(np.array(c)))) > 0.02


def test_freezing_and_bohbot_numbers() -> None:
    assert sharp.freezing_tokens(4.0) == pytest.approx(math.exp(8))
    assert math.isinf(sharp.freezing_tokens(60.0))
    assert bohbot.moment_exponent(0.0) == bohbot.moment_exponent_experimental(0.0) == 0.5
    assert bohbot.moment_exponent(2.0) == pytest.approx(1 / 130)
    assert bohbot.moment_exponent_experimental(2.0) == pytest.approx(1 / 6)


def test_exact_slope_at_horizon_one_follows_the_rms_exponent() -> None:
    """Gaussian tokens and queries, d = 1, h = 1: local slope of the exact root mean square error
    from 1e14 to 1e15.
    """
    r, w = np.polynomial.legendre.leggauss(120)
    x, density = 6.5 * (r + 1), w * np.exp(-((6.5 * (r + 1)) ** 2) / 2)
    f1, _ = gaussian_error(np.array([[10**14], [10**15]]), x[None, :])
    means = f1 @ density
    slope = 0.5 * math.log(means[0] / means[1]) / math.log(10)
    assert slope == pytest.approx(sharp.l2_exponent_rms(1.0), abs=0.01)
    assert abs(slope - sharp.l2_exponent_typical(1.0)) > 0.02


EYE = torch.eye(3, dtype=torch.float64)
QUERY = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)


def test_critical_scales_of_gaussian_tokens_in_closed_form() -> None:
    """Scores of deviation s: n phi(z) / s, the supremum over gaps of log n P(score > m - t) / t."""
    n = np.array([2, 10, 1000, 10**6])
    law = es.Gaussian(torch.diag(torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)), QUERY)
    z, s = -ndtri(1 / n), math.sqrt(1 + 0.5 * 4)
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    found = sharp.critical_scale(es.Head(EYE, EYE), law, QUERY, n)
    np.testing.assert_allclose(found, n * density / s, rtol=1e-6)
    gaps = np.geomspace(1e-6, 10.0, 2000)[:, None]
    rates = np.log(n * ndtr(gaps - z)) / (s * gaps)
    np.testing.assert_allclose(found, rates.max(0), rtol=1e-5)
    assert np.isinf(sharp.critical_scale(es.Head(0 * EYE, EYE), law, QUERY, [100])).all()
    with pytest.raises(ValueError, match="expected Gaussian tokens, got Cube"):
        sharp.critical_scale(es.Head(EYE, EYE), es.Cube(3), QUERY, n)


def test_rows_freeze_near_the_scale_of_their_law() -> None:
    """Median over 400 rows of 4096 Gaussian scores, over the law's: the limit 1.256 of points of a
    Poisson process, within 4.5 standard errors of a median (1.5 / 20); fixed seed.
    """
    from esscher.tails.scores import critical_scale, gap_counts

    scores = torch.randn(400, 4096, generator=torch.Generator().manual_seed(2)).double()
    law = sharp.critical_scale(es.Head(EYE, EYE), es.Gaussian(EYE), EYE[0], [4096])[0]
    ratio = float(critical_scale(*gap_counts(scores)).median()) / law
    assert abs(ratio - 1.256) < 4.5 * 1.5 / 20


@pytest.mark.parametrize("delta", [0.5, 0.1, 1e-3])
def test_the_chi_squared_radius_holds(delta: float) -> None:
    """Against the chi-squared law where C = I, and a sum of two where it is not."""
    for d in (1, 4, 40):
        assert chi2.sf(sharp.chi_squared_radius(np.ones(d), delta), d) <= delta
    spectrum = np.array([5.0, 0.5, 0.5])
    r2, u = sharp.chi_squared_radius(spectrum, delta), np.linspace(0, 1, 20_001)[1:-1]
    # P(5 X^2 + 0.5 E > r2) with E ~ chi^2(2), over X^2 by its quantiles
    rest = np.maximum(r2 - 5 * chi2.ppf(u, 1), 0) / 0.5
    assert chi2.sf(rest, 2).mean() <= delta


def test_the_chi_squared_radius_of_a_head() -> None:
    """C = exp(s^2) V (Sigma + Sigma theta theta' Sigma) V' for Gaussian tokens; 2000 prompts of
    4000 tokens stay inside with chance 0.99 at least (4.5 standard errors).
    """
    head = es.Head(0.4 * EYE, EYE)
    (found,) = (
        p
        for p in es.predictions(head, es.Gaussian(EYE), radius=1.5)
        if p.name == "delta-chi-squared"
    )
    theta = np.array([0.6, 0.0, 0.0])
    values = math.exp(0.36) * np.array([1 + 0.36, 1.0, 1.0])
    r2 = sharp.chi_squared_radius(values, 0.01)
    assert found.numbers["constant"] == pytest.approx(r2)
    generator, outside = np.random.default_rng(1), 0
    for _ in range(2000):
        y = generator.standard_normal((4000, 3))
        p = np.exp(y @ theta)
        outside += 4000 * np.square(p @ y / p.sum() - theta).sum() > r2
    assert outside / 2000 < 0.01 + 4.5 * math.sqrt(0.01 / 2000)
