"""Every property that a law must have, over the table of laws."""

from __future__ import annotations

import math

import pytest
import torch

import esscher as es
from tests.measures.table import LAWS, Law

ROWS = 5
SAMPLES = 200_000


@pytest.fixture(params=LAWS, ids=lambda law: law.name)
def law(request: pytest.FixtureRequest) -> Law:
    return request.param


def tilts(law: Law, measure: es.Measure) -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    rows = (
        2 * torch.rand(ROWS, measure.dim, dtype=torch.float64, generator=generator) - 1
    ) * law.tilt
    rows[0] = 0.0  # the untilted law is the corner where norms are not differentiable
    return rows


def test_tilted_mean_is_the_gradient_of_log_laplace(law: Law) -> None:
    measure = law.make()
    theta = tilts(law, measure).requires_grad_(True)
    (gradient,) = torch.autograd.grad(measure.log_laplace(theta).sum(), theta)
    torch.testing.assert_close(measure.tilted_mean(theta.detach()), gradient, rtol=1e-9, atol=1e-10)


def test_tilted_mean_is_the_difference_quotient_of_log_laplace(law: Law) -> None:
    """Independent of autograd, which some laws answer with their own derivative."""
    measure, step = law.make(), 1e-4
    theta = tilts(law, measure)
    for i in range(measure.dim):
        shift = torch.zeros(measure.dim, dtype=torch.float64)
        shift[i] = step
        quotient = (measure.log_laplace(theta + shift) - measure.log_laplace(theta - shift)) / (
            2 * step
        )
        torch.testing.assert_close(measure.tilted_mean(theta)[:, i], quotient, rtol=1e-6, atol=1e-7)


def test_tilted_cov_is_the_hessian_of_log_laplace(law: Law) -> None:
    measure = law.make()
    theta = tilts(law, measure)
    hessian = torch.stack(
        [torch.autograd.functional.hessian(measure.log_laplace, row) for row in theta]
    )
    torch.testing.assert_close(measure.tilted_cov(theta), hessian, rtol=1e-8, atol=1e-9)


def test_tilted_cov_is_the_difference_quotient_of_tilted_mean(law: Law) -> None:
    measure, step = law.make(), 1e-4
    theta = tilts(law, measure)
    for i in range(measure.dim):
        shift = torch.zeros(measure.dim, dtype=torch.float64)
        shift[i] = step
        quotient = (measure.tilted_mean(theta + shift) - measure.tilted_mean(theta - shift)) / (
            2 * step
        )
        torch.testing.assert_close(
            measure.tilted_cov(theta)[:, :, i], quotient, rtol=1e-6, atol=1e-7
        )


def test_samples_have_the_stated_mean_and_covariance(law: Law) -> None:
    """Within 4 standard errors per entry; at most 30 entries a law, so a false alarm has chance
    below 0.002 a law.
    """
    measure = law.make()
    tokens = measure.sample(SAMPLES, torch.Generator().manual_seed(5))
    centred = tokens - measure.mean
    within(centred, torch.zeros_like(measure.mean))
    within((centred[:, :, None] * centred[:, None, :]).flatten(1), measure.cov.flatten())


def test_log_laplace_agrees_with_samples(law: Law) -> None:
    """E exp<theta, y> against its sample mean at a small tilt, 4 standard errors, 4 rows."""
    measure = law.make()
    theta = 0.4 * tilts(law, measure)[1:]
    tokens = measure.sample(SAMPLES, torch.Generator().manual_seed(6))
    within(
        torch.exp(tokens @ theta.T - measure.log_laplace(theta)),
        torch.ones(ROWS - 1, dtype=torch.float64),
    )


def within(samples: torch.Tensor, expected: torch.Tensor, errors: float = 4.0) -> None:
    """Sample means within so many standard errors of what is expected."""
    standard_error = samples.std(dim=0) / math.sqrt(samples.shape[0])
    apart = (samples.mean(dim=0) - expected).abs()
    assert bool((apart <= errors * standard_error + 1e-12).all()), (apart / standard_error).max()


def test_batches_of_any_shape_and_the_dtype_of_theta(law: Law) -> None:
    measure = law.make()
    theta = tilts(law, measure)[1:].reshape(2, 2, measure.dim)
    assert measure.log_laplace(theta).shape == (2, 2)
    assert measure.tilted_mean(theta).shape == (2, 2, measure.dim)
    assert measure.tilted_cov(theta).shape == (2, 2, measure.dim, measure.dim)
    single = measure.tilted_mean(theta[0, 0])
    torch.testing.assert_close(single, measure.tilted_mean(theta)[0, 0])
    low = measure.tilted_mean(theta.float())
    assert low.dtype == torch.float32
    torch.testing.assert_close(
        low.double(), measure.tilted_mean(theta.float().double()), rtol=1e-6, atol=1e-6
    )


def test_samples_depend_on_the_generator_alone(law: Law) -> None:
    measure = law.make()
    first = measure.sample(17, torch.Generator().manual_seed(3))
    torch.rand(5)
    assert torch.equal(first, measure.sample(17, torch.Generator().manual_seed(3)))
    assert first.shape == (17, measure.dim)
    assert first.dtype == measure.dtype


@pytest.mark.parametrize(
    ("theta", "word"),
    [
        (lambda d: torch.full((2, d), torch.nan), "finite"),
        (lambda d: torch.full((2, d), torch.inf), "finite"),
        (lambda d: torch.zeros(2, d, dtype=torch.int64), "floating"),
        (lambda d: torch.zeros(2, d + 1), "rows of length"),
        (lambda d: "theta", "numbers"),
    ],
)
def test_bad_theta_is_refused(law: Law, theta: object, word: str) -> None:
    measure = law.make()
    for method in (measure.log_laplace, measure.tilted_mean, measure.tilted_cov):
        with pytest.raises(ValueError, match=word):
            method(theta(measure.dim))  # type: ignore[operator]


@pytest.mark.parametrize("n", [0, -1, 2.5, float("nan"), "many"])
def test_bad_sample_size_is_refused(law: Law, n: object) -> None:
    with pytest.raises(ValueError, match="n: expected whole numbers"):
        law.make().sample(n, torch.Generator())


BOUNDED = [
    law for law in LAWS if not any(word in law.name for word in ("gaussian", "laplace", "mixture"))
]


@pytest.mark.parametrize("law", BOUNDED, ids=lambda law: law.name)
def test_extreme_is_the_tilted_mean_of_an_endless_tilt(law: Law) -> None:
    measure = law.make()
    theta = tilts(law, measure)[1:]
    torch.testing.assert_close(
        measure.extreme(theta), measure.tilted_mean(1e9 * theta), rtol=1e-6, atol=1e-6
    )


def test_extreme_of_unbounded_and_mixed_laws() -> None:
    for measure in (
        es.Gaussian([[1.0]]),
        es.Laplace(2),
        es.Mixture([1, 1], [es.Sphere(2), es.Gaussian(torch.eye(2))]),
    ):
        with pytest.raises(ValueError, match="unbounded"):
            measure.extreme(torch.full((1, measure.dim), 0.1))
    with pytest.raises(ValueError, match="is a mixture"):
        es.Mixture([1, 1], [es.Sphere(2), es.Ball(2)]).extreme([[0.0, 2.0]])
