"""Sub-Gaussian parameters and moments over the table of laws: the defining inequality, sharpness, simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import esscher as es
from esscher.theory.subgaussian import norm_moment, subgaussian_parameter, support_radius, value_fourth_moment
from tests.measures.table import LAWS, Law

SHARP = (es.Gaussian, es.Sphere, es.Ball, es.Rademacher, es.Cube)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_transform_lies_below_the_parabola(law: Law, generator: torch.Generator) -> None:
    """K(theta) - <theta, mean> <= sigma^2 |theta|^2 / 2 over six orders of magnitude of theta."""
    measure = law.make()
    sigma = subgaussian_parameter(measure)
    if sigma is None:
        assert law.tilt < 1.0  # the table marks laws whose transform has a strip
        return
    directions = torch.nn.functional.normalize(torch.randn(300, measure.dim, dtype=torch.float64, generator=generator), dim=1)
    sizes = torch.logspace(-3, 3, 300, dtype=torch.float64) / sigma
    theta = sizes[:, None] * directions
    gap = measure.log_laplace(theta) - theta @ measure.mean.double()
    parabola = 0.5 * sigma**2 * sizes**2
    noise = 1e-12 * (1 + measure.log_laplace(theta).abs() + (theta @ measure.mean.double()).abs())
    assert bool((gap <= parabola * (1 + 1e-9) + noise).all())
    assert sigma**2 >= measure.reach * (1 - 1e-9)  # the second-order term at theta = 0
    if isinstance(measure, SHARP):
        assert sigma**2 == pytest.approx(measure.reach, rel=1e-9)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_moments_against_simulation(law: Law, generator: torch.Generator) -> None:
    """E|y - m|^4, ^8 and E|V(y - m)|^4 from 200000 draws; exact within 5 standard errors, mixtures from above.

    The false alarm rate is below 1e-5 a law, eighth powers being far from normal but bounded or Gaussian.
    """
    measure = law.make()
    V = torch.randn(2, measure.dim, dtype=torch.float64, generator=generator)
    apart = measure.sample(200_000, generator).double() - measure.mean.double()
    cases = [
        (norm_moment(measure, 4), apart.norm(dim=1) ** 4),
        (norm_moment(measure, 8), apart.norm(dim=1) ** 8),
        (value_fourth_moment(measure, V), (apart @ V.T).norm(dim=1) ** 4),
    ]
    for known, sampled in cases:
        assert known is not None
        mean, error = float(sampled.mean()), float(sampled.std()) / math.sqrt(len(sampled))
        if isinstance(measure, es.Mixture):
            assert known >= mean - 5 * error
        else:
            assert abs(known - mean) <= 5 * error + 1e-9 * known
    radius = support_radius(measure)
    assert radius is None or float(apart.norm(dim=1).max()) <= radius * (1 + 1e-9)


def test_high_moments_of_a_gaussian_norm() -> None:
    """|g|^2 is chi-square with d degrees: E|g|^{2r} = d (d+2) .. (d+2r-2)."""
    for order in (2, 4, 8, 16):
        expected = math.prod(range(3, 3 + order, 2))
        assert norm_moment(es.Gaussian(torch.eye(3, dtype=torch.float64)), order) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match="order"):
        norm_moment(es.Cube(2), 3)


def test_two_sided_mixture_is_sharp() -> None:
    """Half at +m, half at -m plus Gaussian noise: cosh and a Gaussian, so sigma^2 = |m|^2 + s^2."""
    m = torch.tensor([0.6, 0.8], dtype=torch.float64)
    noise = 0.25 * torch.eye(2, dtype=torch.float64)
    mixture = es.Mixture([0.5, 0.5], [es.Gaussian(noise, m), es.Gaussian(noise, -m)])
    assert subgaussian_parameter(mixture) == pytest.approx(math.sqrt(1.25), rel=1e-12)


def test_weightless_parts_do_not_count() -> None:
    far = es.Pool(torch.tensor([[-1.0], [1.0], [50.0]], dtype=torch.float64), weights=[0.5, 0.5, 0.0])
    assert subgaussian_parameter(far) == pytest.approx(1.0)
    assert support_radius(far) == pytest.approx(1.0)
    mixture = es.Mixture([1.0, 0.0], [es.Rademacher(1), es.Laplace(1)])
    assert subgaussian_parameter(mixture) == pytest.approx(1.0)
    assert subgaussian_parameter(es.Mixture([0.5, 0.5], [es.Rademacher(1), es.Laplace(1)])) is None
    assert support_radius(es.Mixture([0.5, 0.5], [es.Rademacher(1), es.Laplace(1)])) is None


def test_mixture_moment_is_exact_for_one_component() -> None:
    cube = es.Cube(3, 1.9)
    for order in (4, 8):
        assert norm_moment(es.Mixture([1.0], [cube]), order) == pytest.approx(norm_moment(cube, order))
    assert np.isfinite(norm_moment(cube, 16) or np.nan)
