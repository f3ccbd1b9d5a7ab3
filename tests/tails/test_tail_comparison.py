"""Pareto against sub-Gaussian tails: likelihoods against scipy and mpmath, verdicts and false
alarms on known laws.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import scipy.stats
from numpy.random import Generator

from esscher.tails import extremes
from esscher.tails.extremes import Floats, TailComparison, compare

Draw = Callable[[Generator, int], Floats]
LAWS: dict[str, Draw] = {
    "normal": lambda generator, n: generator.standard_normal(n),
    "uniform": lambda generator, n: generator.uniform(-1.0, 1.0, n) * math.sqrt(3.0),
    "laplace": lambda generator, n: generator.laplace(size=n) / math.sqrt(2.0),
    "student": lambda generator, n: generator.standard_t(3, n) / math.sqrt(3.0),
    "pareto": lambda generator, n: generator.pareto(4.0, n),
}
TOKENS, TAIL = 16384, 1638


def largest(values: Floats, tail: int, groups: int = 1) -> TailComparison:
    """Of the ``tail`` largest values; as many as ``groups`` of them in turn are one witness."""
    top = np.sort(values)[-(tail + 1) :]
    return compare(top, float(top[0]), np.arange(len(top)) // groups)


@pytest.mark.parametrize("shape", [-0.3, 0.0, 0.1, 0.5, 1.5])
def test_the_pareto_fit_is_the_largest_likelihood(shape: float) -> None:
    """No law near it, nor the one that was drawn from, has a larger one."""
    excess = scipy.stats.genpareto(shape, scale=0.3).rvs(
        2000, random_state=np.random.default_rng(5)
    )
    found = extremes._fit_pareto(excess)

    def likelihood(shape: float, scale: float) -> float:
        return float(scipy.stats.genpareto(shape, scale=scale).logpdf(excess).sum())

    ours = likelihood(*found)
    assert ours >= likelihood(shape, 0.3)
    for step in (1e-3, 1e-2):
        for other in ((step, 1.0), (-step, 1.0), (0.0, 1 + step), (0.0, 1 - step)):
            assert ours >= likelihood(found[0] + other[0], found[1] * other[1])


@pytest.mark.parametrize(
    ("threshold", "scale"), [(0.5, 1.0), (3.0, 1.0), (4.0, 0.02), (2.0, 30.0), (5.0, 1e-4)]
)
def test_the_gaussian_tail_is_that_of_mpmath(threshold: float, scale: float) -> None:
    generator = np.random.default_rng(6)
    cut = (
        scipy.stats.truncnorm(threshold / scale, math.inf, scale=scale)
        if threshold / scale < 30
        else None
    )
    excess = (
        generator.exponential(scale**2 / threshold, 500)
        if cut is None
        else cut.rvs(500, random_state=generator) - threshold
    )
    z = threshold + excess
    sigma, density = extremes._fit_gaussian(z, threshold)
    with mpmath.workdps(60):

        def log_density(x: float, s: mpmath.mpf) -> mpmath.mpf:
            beyond = mpmath.erfc(threshold / (s * mpmath.sqrt(2))) / 2
            return mpmath.log(mpmath.npdf(mpmath.mpf(x) / s) / s / beyond)

        for value, own in zip(z[:5], density[:5], strict=True):
            assert own == pytest.approx(
                float(log_density(float(value), mpmath.mpf(sigma))), rel=1e-7, abs=1e-9
            )

        def total(s: mpmath.mpf) -> mpmath.mpf:
            squares = mpmath.mpf(float(np.mean(np.square(z))))
            beyond = mpmath.erfc(threshold / (s * mpmath.sqrt(2))) / 2
            return -mpmath.log(s) - squares / (2 * s**2) - mpmath.log(beyond)

        for other in (0.999, 1.001):
            assert total(mpmath.mpf(sigma)) > total(mpmath.mpf(sigma * other))


@pytest.mark.parametrize(
    ("law", "verdict", "least"),
    [
        ("normal", "sub-Gaussian", 0.8),
        ("uniform", "sub-Gaussian", 1.0),
        ("laplace", "between", 0.85),
        ("student", "Pareto", 0.9),
    ],
)
def test_verdicts_of_known_laws(law: str, verdict: str, least: float) -> None:
    """Of 60 samples at least so many are judged right: .93, 1, .98 and .99 are expected, 2.5
    deviations and more above.
    """
    generator = np.random.default_rng(7)
    found = Counter(largest(LAWS[law](generator, TOKENS), TAIL).verdict for _ in range(60))
    assert found[verdict] >= least * 60, found


def test_false_alarms_are_rare() -> None:
    """Gaussian tails are called Pareto, and Pareto ones sub-Gaussian, in less than 2.5 % each: none
    in 160 samples of 204

    values, where 2.5 % would show none with a chance of 1.7 %.
    """
    generator = np.random.default_rng(8)
    normal = Counter(largest(LAWS["normal"](generator, 2048), 204).verdict for _ in range(160))
    student = Counter(largest(LAWS["student"](generator, 2048), 204).verdict for _ in range(160))
    assert normal["Pareto"] + normal["between"] == 0, normal
    assert student["sub-Gaussian"] == 0, student


@pytest.mark.parametrize("groups", [1, 8])
def test_intervals_of_the_shape_hold_it(groups: int) -> None:
    """On exact Pareto tails, also where each value comes ``groups`` times: 95 % of 150, less 4
    standard errors.
    """
    generator, held = np.random.default_rng(9), 0
    for _ in range(150):
        excess = np.repeat(scipy.stats.genpareto(0.25).rvs(400, random_state=generator), groups)
        low, high = compare(3.0 + excess, 3.0, np.arange(len(excess)) // groups).shape_interval
        held += low < 0.25 < high
    assert held / 150 > 0.88


def test_repeated_values_are_one_witness() -> None:
    """The same values eight times over say no more than once."""
    once = LAWS["student"](np.random.default_rng(10), 4096)
    top = np.sort(once)[-401:]
    single, many = (
        compare(top, float(top[0]), np.arange(401)),
        compare(np.repeat(top, 8), float(top[0]), np.repeat(np.arange(401), 8)),
    )
    assert many.exceedances == 8 * single.exceedances
    assert many.groups == single.groups == 400
    for name in ("shape", "sigma", "ratio", "shape_interval"):
        assert getattr(many, name) == pytest.approx(getattr(single, name), rel=1e-6)


def test_one_value_decides_nothing() -> None:
    z = np.sort(np.abs(LAWS["normal"](np.random.default_rng(11), 40_000)))[-401:]
    z[-1] = 40.0
    found = compare(z, float(z[0]), np.arange(401))
    assert found.verdict == "undecided"
    assert found.ratio > 0.1


def test_too_little_is_unknown() -> None:
    few = compare(np.linspace(3.0, 4.0, 20), 2.0, np.arange(20))
    alike = compare(np.full(100, 3.0), 3.0, np.arange(100))
    same_token = compare(np.linspace(3.0, 4.0, 100), 2.0, np.arange(100) % 3)
    for found in (few, alike, same_token):
        assert found.verdict == "unknown"
        assert math.isnan(found.shape)
        assert "too few or too much alike" in found.reason
