"""Sub-Gaussian parameters and moments over the table of laws: the defining inequality, sharpness,
simulation.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import esscher as es
from tests.measures.table import LAWS, Law


def subgaussian_matrices(measure: es.Measure) -> list[torch.Tensor]:
    root = measure.subgaussian_root
    return [] if root is None else [root @ root.T]


SHARP = (es.Gaussian, es.Sphere, es.Ball, es.Rademacher, es.Cube)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_transform_lies_below_the_parabola(law: Law, generator: torch.Generator) -> None:
    """K(theta) - <theta, mean> <= sigma^2 |theta|^2 / 2 over six orders of magnitude of theta."""
    measure = law.make()
    sigma = measure.sigma
    if sigma is None:
        assert law.tilt < 1.0  # the table marks laws whose transform has a strip
        return
    directions = torch.nn.functional.normalize(
        torch.randn(300, measure.dim, dtype=torch.float64, generator=generator), dim=1
    )
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
    """E|y - m|^4, ^8 and E|V(y - m)|^4 from 200000 draws; exact within 5 standard errors, mixtures
    from above.

    The false alarm rate is below 1e-5 a law, eighth powers being far from normal but bounded or
    Gaussian.
    """
    measure = law.make()
    V = torch.randn(2, measure.dim, dtype=torch.float64, generator=generator)
    apart = measure.sample(200_000, generator).double() - measure.mean.double()
    cases = [
        (measure.norm_moment(4), apart.norm(dim=1) ** 4),
        (measure.norm_moment(8), apart.norm(dim=1) ** 8),
        (measure.norm_moment(4, V), (apart @ V.T).norm(dim=1) ** 4),
    ]
    for known, sampled in cases:
        assert known is not None
        mean, error = float(sampled.mean()), float(sampled.std()) / math.sqrt(len(sampled))
        if isinstance(measure, es.Mixture):
            assert known >= mean - 5 * error
        else:
            assert abs(known - mean) <= 5 * error + 1e-9 * known
    radius = measure.support_radius()
    assert radius is None or float(apart.norm(dim=1).max()) <= radius * (1 + 1e-9)


def test_high_moments_of_a_gaussian_norm() -> None:
    """|g|^2 is chi-square with d degrees: E|g|^{2r} = d (d+2) .. (d+2r-2)."""
    for order in (2, 4, 8, 16):
        expected = math.prod(range(3, 3 + order, 2))
        assert es.Gaussian(torch.eye(3, dtype=torch.float64)).norm_moment(order) == pytest.approx(
            expected, rel=1e-12
        )


def test_two_sided_mixture_is_sharp() -> None:
    """Half at +m, half at -m plus Gaussian noise: cosh and a Gaussian, so sigma^2 = |m|^2 + s^2."""
    m = torch.tensor([0.6, 0.8], dtype=torch.float64)
    noise = 0.25 * torch.eye(2, dtype=torch.float64)
    mixture = es.Mixture([0.5, 0.5], [es.Gaussian(noise, m), es.Gaussian(noise, -m)])
    assert mixture.sigma == pytest.approx(math.sqrt(1.25), rel=1e-12)


def test_weightless_parts_do_not_count() -> None:
    mixture = es.Mixture([1.0, 0.0], [es.Rademacher(1), es.Laplace(1)])
    assert mixture.sigma == pytest.approx(1.0)
    assert es.Mixture([0.5, 0.5], [es.Rademacher(1), es.Laplace(1)]).sigma is None
    assert es.Mixture([0.5, 0.5], [es.Rademacher(1), es.Laplace(1)]).support_radius() is None


def test_mixture_moment_is_exact_for_one_component() -> None:
    cube = es.Cube(3, 1.9)
    for order in (4, 8):
        assert es.Mixture([1.0], [cube]).norm_moment(order) == pytest.approx(
            cube.norm_moment(order)
        )
    assert np.isfinite(cube.norm_moment(16) or np.nan)


MATRIX_LAWS = [
    *LAWS,
    Law(
        "two widths",
        lambda: es.Mixture([0.9, 0.1], [es.Gaussian([[0.01]]), es.Gaussian([[100.0]])]),
    ),
]


@pytest.mark.parametrize("law", MATRIX_LAWS, ids=lambda law: law.name)
def test_transform_lies_below_every_matrix(law: Law, generator: torch.Generator) -> None:
    """K(theta) - <theta, mean> <= theta^T S theta / 2 along random theta and along the eigenvectors
    of S; S >= Cov.
    """
    measure = law.make()
    matrices = subgaussian_matrices(measure)
    assert bool(matrices) == (measure.sigma is not None)
    for matrix in matrices:
        values, vectors = torch.linalg.eigh(matrix)
        assert float(torch.linalg.eigvalsh(matrix - measure.cov.double())[0]) >= -1e-9 * float(
            values[-1]
        )
        noise = torch.randn(300, measure.dim, dtype=torch.float64, generator=generator)
        directions = torch.nn.functional.normalize(torch.cat([noise, vectors.T, -vectors.T]), dim=1)
        sizes = (
            torch.logspace(-3, 3, 13, dtype=torch.float64)[:, None, None] / float(values[-1]) ** 0.5
        )
        theta = (sizes * directions).reshape(-1, measure.dim)
        height = measure.log_laplace(theta)
        gap = height - theta @ measure.mean.double()
        rounding = 1e-12 * (1 + height.abs() + (theta @ measure.mean.double()).abs())
        assert bool(
            (gap <= 0.5 * ((theta @ matrix) * theta).sum(dim=1) * (1 + 1e-9) + rounding).all()
        )


def test_random_mixtures_and_pools_lie_below_their_matrices(generator: torch.Generator) -> None:
    """Unequal covariances and means, in up to four dimensions, and the means alone as a pool."""
    for case in range(40):
        d, parts = 1 + case % 4, 2 + case % 3
        sizes = 10 ** torch.linspace(-1, 1, parts)[:, None, None]
        roots = sizes * torch.randn(parts, d, d, dtype=torch.float64, generator=generator)
        means = 2 * torch.randn(parts, d, dtype=torch.float64, generator=generator)
        weights = torch.rand(parts, generator=generator) ** 3 + 1e-3
        mixture = es.Mixture(
            weights, [es.Gaussian(r @ r.T, m) for r, m in zip(roots, means, strict=True)]
        )
        for measure in (mixture, es.Pool(means)):
            theta = (
                torch.randn(400, d, dtype=torch.float64, generator=generator)
                * 10 ** torch.linspace(-2, 1, 400)[:, None]
            )
            gap = measure.log_laplace(theta) - theta @ measure.mean
            for matrix in subgaussian_matrices(measure):
                assert bool(
                    (
                        gap
                        <= 0.5 * ((theta @ matrix) * theta).sum(1) * (1 + 1e-9)
                        + 1e-9 * (1 + gap.abs())
                    ).all()
                )


def test_mixtures_are_sharp_where_one_part_is_the_widest() -> None:
    """Centred parts, one at least the other: sigma is that of the wider."""
    narrow, wide = (
        torch.diag(torch.tensor([0.1, 1.0]).double()),
        torch.diag(torch.tensor([2.0, 3.0]).double()),
    )
    for parts in ([narrow, wide], [wide, narrow]):
        mixture = es.Mixture([0.5, 0.5], [es.Gaussian(part) for part in parts])
        assert mixture.sigma == pytest.approx(math.sqrt(3.0), rel=1e-12)
