"""Attention on infinitely many tokens: closed forms, push-forward, and what finite attention
converges to.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.special
import torch

import esscher as es
from esscher.attention.limit import sampled
from tests.attention.reference import attend_tokens
from tests.measures.table import LAWS, Law


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gaussian_case(
    seed: int, rank: int
) -> tuple[es.Head, es.Gaussian, torch.Tensor, torch.Tensor, torch.Tensor]:
    d = 5
    factor = randn(d, rank, seed=seed)
    mean, cov = randn(d, seed=seed + 1), factor @ factor.T
    query, key, value = (
        randn(3, d, seed=seed + 2),
        randn(3, d, seed=seed + 3),
        randn(4, d, seed=seed + 4),
    )
    return es.Head(key.T @ query, value), es.Gaussian(cov, mean), mean, cov, key.T @ query


@pytest.mark.parametrize("rank", [2, 5])
@pytest.mark.parametrize("seed", [0, 10, 20])
def test_gaussian_limit_is_affine_with_gaussian_pushforward(seed: int, rank: int) -> None:
    """[S] Lemma 2.1: T(z) = V m + V Sigma K^T Q z; push-forward N(V (I + Sigma U) m, (V Sigma U)
    Sigma (V Sigma U)^T).
    """
    head, measure, mean, cov, U = gaussian_case(seed, rank)
    z = randn(7, 5, seed=seed + 5)
    torch.testing.assert_close(
        es.limit(head, measure)(z), mean @ head.V.T + z @ (head.V @ cov @ U).T
    )
    out_mean, out_cov = es.limit(head, measure).pushforward()
    torch.testing.assert_close(out_mean, head.V @ (torch.eye(5).double() + cov @ U) @ mean)
    torch.testing.assert_close(out_cov, head.V @ cov @ U @ cov @ (head.V @ cov @ U).T)


def test_gaussian_pushforward_with_biases_agrees_with_samples() -> None:
    """4 standard errors, 20 entries: false alarm below 0.002."""
    head = es.Head(0.4 * randn(3, 3), randn(4, 3, seed=1), randn(3, seed=2), randn(4, seed=3))
    measure = es.Gaussian(torch.diag(torch.tensor([1.0, 0.5, 2.0]).double()), randn(3, seed=4))
    limit = es.limit(head, measure)
    values = limit(measure.sample(200_000, torch.Generator().manual_seed(5)))
    mean, cov = limit.pushforward()
    assert bool(((values.mean(0) - mean).abs() <= 4 * values.std(0) / math.sqrt(len(values))).all())
    centred = values - mean
    products = (centred[:, :, None] * centred[:, None, :]).flatten(1)
    assert bool(
        (
            (products.mean(0) - cov.flatten()).abs() <= 4 * products.std(0) / math.sqrt(len(values))
        ).all()
    )


def test_linear_and_softmax_limits_coincide_for_centred_gaussians_only() -> None:
    head, _, mean, cov, _ = gaussian_case(3, 5)
    z = randn(6, 5, seed=9)
    centred, shifted, cube = es.Gaussian(cov), es.Gaussian(cov, mean), es.Cube(5)
    torch.testing.assert_close(es.limit(head, centred)(z), es.linear_limit(head, centred)(z))
    for a, b in zip(
        es.limit(head, centred).pushforward(),
        es.linear_limit(head, centred).pushforward(),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    for other in (shifted, cube):
        assert (
            float((es.limit(head, other)(z) - es.linear_limit(head, other)(z)).abs().max()) > 0.05
        )


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_finite_attention_converges_to_the_limit(law: Law) -> None:
    """Softmax and linear on 400,000 tokens, within 5 delta-method standard errors: error of a ratio
    of means.
    """
    measure = law.make()
    d = measure.dim
    head = es.Head(
        0.3 * law.tilt * torch.eye(d).double(),
        randn(2, d),
        0.1 * law.tilt * torch.ones(d).double(),
        randn(2, seed=1),
    )
    x = torch.linspace(-1, 1, 3 * d, dtype=torch.float64).reshape(3, d)
    tokens = measure.sample(400_000, torch.Generator().manual_seed(8))
    weights = torch.exp(tokens @ head.tilt(x).T - measure.log_laplace(head.tilt(x)))
    values = head.values(tokens)
    for kernel, limit in (
        ("softmax", es.limit(head, measure)(x)),
        ("linear", es.linear_limit(head, measure)(x)),
    ):
        out = attend_tokens(head, x, tokens, kernel=kernel)
        for i in range(3):
            centred = values - limit[i]
            noise = (
                weights[:, i, None] * centred
                if kernel == "softmax"
                else (tokens @ head.tilt(x)[i])[:, None] * values
            )
            standard_error = noise.std(dim=0) / math.sqrt(len(tokens))
            assert bool(((out[i] - limit[i]).abs() <= 5 * standard_error + 1e-12).all()), (
                law.name,
                kernel,
            )


def test_hardmax_converges_to_its_limit() -> None:
    head = es.Head(torch.eye(2).double(), torch.eye(2).double())
    x = randn(5, 2)
    for measure, tolerance in (
        (es.Sphere(2, 1.5), 1e-3),
        (es.Rademacher(2), 1e-12),
        (es.Cube(2), 0.05),
        (es.Ball(2), 0.05),
    ):
        tokens = measure.sample(100_000, torch.Generator().manual_seed(0))
        out = attend_tokens(head, x, tokens, kernel="hardmax")
        torch.testing.assert_close(out, es.hardmax_limit(head, measure)(x), rtol=0, atol=tolerance)
    with pytest.raises(ValueError, match="unbounded"):
        es.hardmax_limit(head, es.Gaussian(torch.eye(2)))(x)


# ---- push-forward of the sphere and the ball
# -----------------------------------------------------------------------------


def circle_covariance(head: es.Head, radius: float) -> np.ndarray:
    """Brute force in two dimensions: a fine trapezoid rule over the circle, which converges
    geometrically.
    """
    angles = torch.arange(4096, dtype=torch.float64) * (2 * math.pi / 4096)
    outputs = es.limit(head, es.Sphere(2, radius))(
        radius * torch.stack([angles.cos(), angles.sin()], dim=1)
    )
    return np.cov(outputs.numpy().T, bias=True)


@pytest.mark.parametrize("radius", [0.5, 2.0])
def test_circle_pushforward_against_brute_force(radius: float) -> None:
    head = es.Head(randn(2, 2), randn(3, 2, seed=1))
    result = es.limit(head, es.Sphere(2, radius)).pushforward()
    expected = circle_covariance(head, radius)
    assert np.abs(result.cov.numpy() - expected).max() <= max(result.cov_error, 1e-12)
    assert result.cov_error < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("dim", [3, 4])
def test_disc_and_ball_pushforward_against_nested_quadrature(dim: int) -> None:
    """A = diag(a, b, ..., b): only the first coordinate w of a direction matters, so two integrals
    are left.

    A product of Gauss rules, Gegenbauer's for the density of w and Legendre's for the radius t,
    whose integrand has no kink: twice the nodes change nothing.
    """
    a, b, radius = 3.0, 0.7, 1.4
    head = es.Head(
        torch.diag(torch.tensor([a] + [b] * (dim - 1)).double()), torch.eye(dim).double()
    )
    measure = es.Ball(dim, radius)

    def second_moment(nodes: int) -> float:
        w, of_w = scipy.special.roots_gegenbauer(nodes, dim / 2 - 1)
        t, of_t = scipy.special.roots_legendre(nodes)
        t = 0.5 * (1 + t)
        of_t = 0.5 * of_t * dim * t ** (dim - 1)
        x = np.zeros((nodes, nodes, dim))
        x[:, :, 0], x[:, :, 1] = radius * np.outer(t, w), radius * np.outer(t, np.sqrt(1 - w * w))
        first = es.limit(head, measure)(x.reshape(-1, dim))[:, 0].numpy().reshape(nodes, nodes)
        return float(of_t @ first**2 @ (of_w / of_w.sum()))

    expected = second_moment(48)
    assert second_moment(96) == pytest.approx(expected, rel=1e-13)
    result = es.limit(head, measure).pushforward()
    assert result.method == "quadrature"
    assert abs(float(result.cov[0, 0]) - expected) <= max(result.cov_error, 1e-7)


@pytest.mark.parametrize(("dim", "radius"), [(50, 7.0), (384, 20.0)])
def test_sphere_pushforward_in_high_dimension(dim: int, radius: float) -> None:
    """Stated error below 1e-6 relative; 40,000 plain draws agree within 5 standard errors in the
    whole covariance's norm.
    """
    head = es.Head(2 / math.sqrt(dim) * randn(dim, dim), randn(3, dim, seed=1) / math.sqrt(dim))
    limit = es.limit(head, es.Sphere(dim, radius))
    result = limit.pushforward()
    assert result.cov_error < 1e-6 * float(result.cov.norm())
    check = sampled(limit, es.Sphere(dim, radius), 40_000)
    assert float((check.cov - result.cov).norm()) < 5 * check.cov_error
    assert float((check.mean - result.mean).norm()) < 5 * check.mean_error


@pytest.mark.parametrize("rank", [1, 2, 7])
def test_low_rank_sphere_pushforward(rank: int) -> None:
    """Rank one by a one-dimensional integral over the cosine; the others by plain draws, 5 standard
    errors.
    """
    dim = 30
    head = es.Head(3 * randn(dim, rank) @ randn(rank, dim, seed=1) / dim, torch.eye(dim).double())
    measure = es.Sphere(dim, 2.0)
    limit = es.limit(head, measure)
    result = limit.pushforward()
    if rank == 1:
        left, _, right = torch.linalg.svd(head.A)
        axis = 2.0 * right[0]
        density = lambda w: (1 - w * w) ** ((dim - 3) / 2)  # noqa: E731
        total = scipy.integrate.quad(density, -1, 1)[0]
        size = scipy.integrate.quad(
            lambda w: float((limit(w * axis) @ left[:, 0]) ** 2) * density(w) / total, -1, 1
        )[0]
        assert float(result.cov.trace()) == pytest.approx(size, rel=1e-4)
        assert abs(float(result.cov.trace()) - size) <= max(result.cov_error, 1e-9)
    check = sampled(limit, measure)
    assert float((check.cov - result.cov).norm()) < 5 * check.cov_error


def test_isotropic_and_zero_maps() -> None:
    measure = es.Sphere(6, 1.5)
    result = es.limit(
        es.Head(0.8 * torch.eye(6).double(), torch.eye(6).double()), measure
    ).pushforward()
    one = es.limit(es.Head(0.8 * torch.eye(6).double(), torch.eye(6).double()), measure)(
        torch.tensor([1.5, 0, 0, 0, 0, 0]).double()
    )
    torch.testing.assert_close(result.cov, float(one[0]) ** 2 / 6 * torch.eye(6).double())
    nothing = es.limit(
        es.Head(torch.zeros(6, 6).double(), torch.eye(6).double()), measure
    ).pushforward()
    assert float(nothing.cov.abs().max()) == 0.0


def test_sphere_with_a_tilt_bias_and_other_laws_are_estimated_with_a_stated_error() -> None:
    """5 standard errors of each of two independent estimates, in norm."""
    head = es.Head(randn(4, 4), randn(2, 4, seed=1), randn(4, seed=2))
    for measure in (es.Sphere(4), es.Ball(4, 2.0), es.Sphere(4, 3.0)):
        limit = es.limit(head, measure)
        result = limit.pushforward()
        y = limit(measure.sample(200_000, torch.Generator().manual_seed(9)))
        assert result.method == "sampled"
        mean, cov = y.mean(0), torch.cov(y.T)
        assert float((result.mean - mean).norm()) < 10 * result.mean_error
        assert float((result.cov - cov).norm()) < 10 * result.cov_error
    assert es.limit(head, es.Cube(4)).pushforward().method == "sampled"
    assert es.limit(
        es.Head([[2.0]], [[1.0]]), es.Sphere(1)
    ).pushforward().cov.item() == pytest.approx(math.tanh(2) ** 2)


def test_a_pushforward_is_a_pair_that_does_not_change() -> None:
    push = es.limit(
        es.Head(torch.eye(2).double(), torch.eye(2).double()), es.Sphere(2)
    ).pushforward()
    mean, cov = push
    assert mean is push.mean
    assert cov is push.cov
    with pytest.raises(AttributeError):
        push.mean_error = 0.0  # type: ignore[misc]


def test_pool_pushforward_is_self_attention_on_the_pool() -> None:
    tokens = randn(23, 3)
    head = es.Head(randn(3, 3, seed=1), randn(2, 3, seed=2))
    mean, cov = es.limit(head, es.Pool(tokens)).pushforward()
    outputs = attend_tokens(head, tokens, tokens)
    torch.testing.assert_close(mean, outputs.mean(0))
    torch.testing.assert_close(cov, torch.cov(outputs.T, correction=0))


def test_queries_outside_the_strip_have_no_limit() -> None:
    head = es.Head(torch.eye(2).double(), torch.eye(2).double())
    with pytest.raises(ValueError, match="Laplace has no limit there"):
        es.limit(head, es.Laplace(2))([[2.0, 0.0]])
    with pytest.raises(ValueError, match="Laplace has no limit there"):
        es.limit(head, es.Laplace(2)).pushforward()
    with pytest.raises(ValueError, match="queries drawn from the measure"):
        es.limit(es.Head(randn(2, 3), randn(2, 2)), es.Sphere(2)).pushforward()
