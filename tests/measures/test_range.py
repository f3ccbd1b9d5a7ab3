"""Laws at sizes from 1e-98 to 1e98: extremes, samples and weights; beyond 1e100 they are refused.
Transforms and moments at every size are compared with references in ``tests/fuzz``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import esscher as es
from esscher.measures.matrices import spectral_norm

SIZES = [1e-98, 1e-60, 1e-20, 1.0, 3e2, 1e20, 1e60, 1e98]
LAWS: dict[str, Callable[[float], es.Measure]] = {
    "sphere": lambda s: es.Sphere(2, s),
    "ball": lambda s: es.Ball(2, s),
    "cube": lambda s: es.Cube(2, s),
    "rademacher": lambda s: es.Rademacher(2, s),
    "pool": lambda s: es.Pool([[s, 0.0], [-0.5 * s, s], [0.25 * s, -s]]),
}


@pytest.mark.parametrize("name", LAWS)
def test_extremes_do_not_depend_on_the_size_of_the_tilt(name: str) -> None:
    for size in SIZES:
        law = LAWS[name](size)
        expected = law.extreme([0.6, -0.8])
        for tilt in SIZES:
            got = law.extreme([0.6 * tilt, -0.8 * tilt])
            torch.testing.assert_close(got / size, expected / size, rtol=1e-14, atol=0)
        reference = LAWS[name](1.0).extreme([0.6, -0.8])
        torch.testing.assert_close(expected / size, reference, rtol=1e-14, atol=0)


def test_student_and_samples_are_right_or_refused() -> None:
    torch.testing.assert_close(
        es.Student(2, 4.0, 1e98).cov / 1e196, 2.0 * torch.eye(2, dtype=torch.float64)
    )
    with pytest.raises(ValueError, match="leave the range of float16"):
        es.Sphere(3, 1e6, dtype=torch.float16).sample(3)
    with pytest.raises(ValueError, match="leave the range of float16"):
        es.Sphere(2, 1e3, dtype=torch.float16).cov  # noqa: B018


@pytest.mark.parametrize("size", [1e-98, 1.0, 1e98])
def test_samples_of_gaussians_of_any_size(size: float) -> None:
    """The same noise at another size; coordinates of very different size keep their own."""
    unit = torch.tensor([[1.0, 0.3], [0.3, 1.0]], dtype=torch.float64)
    draws = [es.Gaussian(s * unit).sample(7, torch.Generator().manual_seed(1)) for s in (1.0, size)]
    torch.testing.assert_close(draws[1] / math.sqrt(size), draws[0], rtol=1e-10, atol=1e-12)
    uneven = es.Gaussian([[size, 0.0], [0.0, 1.0]]).sample(2000, torch.Generator().manual_seed(1))
    scaled = uneven / torch.tensor([math.sqrt(size), 1.0], dtype=torch.float64)
    # 4.7 standard errors of a variance
    assert float((scaled.T @ scaled / 2000 - torch.eye(2)).abs().max()) < 0.15


def test_weights_of_any_size() -> None:
    for size in (1e-320, 1e-300, 1e300, 1e308):
        law = es.Mixture([size, size], [es.Pool([[1.0]]), es.Pool([[3.0]])])
        torch.testing.assert_close(law.mean, torch.tensor([2.0], dtype=torch.float64))


@pytest.mark.parametrize("size", [1e-98, 1.0, 1e98])
def test_the_largest_singular_value_of_a_wide_matrix_has_any_size(size: float) -> None:
    """By Lanczos iteration, against all singular values of the matrix of size 1."""
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(520, 530, generator=generator, dtype=torch.float64)
    expected = size * float(torch.linalg.matrix_norm(matrix, 2))
    assert spectral_norm(size * matrix) == pytest.approx(expected, rel=1e-9)


def test_a_pool_of_one_token_repeated_has_it_as_its_mean_at_any_tilt() -> None:
    """Weights of scores of 1e10 sum to one to rounding, not to what a logarithm of 1e10 is known
    to.
    """
    token = torch.tensor([1.1937, -0.6194, 0.3449], dtype=torch.float64)
    pool = es.Pool(token.expand(5, 3).clone())
    for size in (1.0, 1e10, 1e99):
        found = pool.tilted_mean(size * torch.tensor([[2.0, 0.3, -1.0]], dtype=torch.float64))
        torch.testing.assert_close(found[0], token, rtol=1e-15, atol=0.0)


@pytest.mark.parametrize("size", [1e-120, 1e120])
def test_sizes_outside_the_range_are_refused(size: float) -> None:
    for make in (
        lambda: es.Gaussian([[size]]),
        lambda: es.Gaussian([[1.0]], [size]),
        lambda: es.Pool([[size]]),
        lambda: es.Sphere(2, size),
        lambda: es.Cube(2, size),
        lambda: es.Laplace(2, size),
        lambda: es.Sphere(2).tilted_mean([size, 0.0]),
    ):
        with pytest.raises(ValueError, match="expected numbers of sizes up to 1e100"):
            make()
