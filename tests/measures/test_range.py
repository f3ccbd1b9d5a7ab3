"""Transforms and moments of every law at sizes from 1e-98 to 1e98: right against mpmath, or
refused; beyond 1e100 refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mpmath
import pytest
import torch

import esscher as es
from esscher.measures.matrices import spectral_norm
from tests.measures.test_radial import log_bessel, reference

LARGEST = mpmath.mpf(torch.finfo(torch.float64).max)
SIZES = [1e-98, 1e-60, 1e-20, 1.0, 3e2, 1e20, 1e60, 1e98]
FAR = 1e150  # beyond it a radius times a tilt is refused
Exact = tuple[mpmath.mpf, list[mpmath.mpf], list[list[mpmath.mpf]]]  # K, its gradient, its Hessian


def radial_reference(v: mpmath.mpf, r: mpmath.mpf) -> tuple[mpmath.mpf, mpmath.mpf, mpmath.mpf]:
    """K, B / r and B'; beyond 1e12 the first terms in 1/r, whose error is of relative size 1/r."""
    if r <= mpmath.mpf(10) ** 12:
        return reference(v, r)
    log = log_bessel(v - 1, r) + mpmath.loggamma(v) - (v - 1) * mpmath.log(r / 2)
    curvature = mpmath.mpf(0) if v == mpmath.mpf(1) / 2 else (v - mpmath.mpf(1) / 2) / r**2
    return log, (1 - (2 * v - 1) / (2 * r)) / r, curvature


def rotational(v: float, radius: float, theta: Sequence[float]) -> Exact:
    size = mpmath.sqrt(mpmath.fsum(mpmath.mpf(t) ** 2 for t in theta))
    log, ratio, curvature = radial_reference(mpmath.mpf(v), radius * size)
    square, d = mpmath.mpf(radius) ** 2, len(theta)
    u = [t / size if size else mpmath.mpf(0) for t in theta]
    cov = [
        [square * (ratio * ((i == j) - u[i] * u[j]) + curvature * u[i] * u[j]) for j in range(d)]
        for i in range(d)
    ]
    return log, [square * ratio * t for t in theta], cov


def product(v: float, radius: float, theta: Sequence[float]) -> Exact:
    parts = [rotational(v, radius, [t]) for t in theta]
    return diagonal(parts)


def diagonal(parts: list[Exact]) -> Exact:
    d = len(parts)
    cov = [[parts[i][2][0][0] if i == j else mpmath.mpf(0) for j in range(d)] for i in range(d)]
    return mpmath.fsum(p[0] for p in parts), [p[1][0] for p in parts], cov


def laplace(scale: float, theta: Sequence[float]) -> Exact:
    def one(t: float) -> Exact:
        b, x = mpmath.mpf(scale), mpmath.mpf(t)
        gap = 1 - (b * x) ** 2
        return -mpmath.log(gap), [2 * b * b * x / gap], [[2 * b * b * (1 + (b * x) ** 2) / gap**2]]

    return diagonal([one(t) for t in theta])


def gaussian(cov: list[list[float]], mean: list[float], theta: Sequence[float]) -> Exact:
    sigma, m = mpmath.matrix(cov), mpmath.matrix(mean)
    x = mpmath.matrix(list(theta))
    push = sigma * x
    return (m.T * x)[0] + (x.T * push)[0] / 2, list(m + push), sigma.tolist()


def mixture(weights: Sequence[Any], parts: list[Exact]) -> Exact:
    total = mpmath.fsum(mpmath.mpf(w) for w in weights)
    top = max(p[0] for p in parts)
    tilted = [
        mpmath.mpf(w) / total * mpmath.exp(p[0] - top) for w, p in zip(weights, parts, strict=True)
    ]
    mass = mpmath.fsum(tilted)
    share = [w / mass for w in tilted]
    d = len(parts[0][1])
    mean = [mpmath.fsum(w * p[1][i] for w, p in zip(share, parts, strict=True)) for i in range(d)]
    cov = [
        [
            mpmath.fsum(
                w * (p[2][i][j] + (p[1][i] - mean[i]) * (p[1][j] - mean[j]))
                for w, p in zip(share, parts, strict=True)
            )
            for j in range(d)
        ]
        for i in range(d)
    ]
    return top + mpmath.log(mass), mean, cov


def point(y: Sequence[float], theta: Sequence[float]) -> Exact:
    d = len(y)
    score = mpmath.fsum(mpmath.mpf(a) * mpmath.mpf(b) for a, b in zip(y, theta, strict=True))
    return score, [mpmath.mpf(a) for a in y], [[mpmath.mpf(0)] * d for _ in range(d)]


def pool(
    points: list[list[float]], weights: list[float]
) -> tuple[es.Measure, Callable[[Sequence[float]], Exact]]:
    return es.Pool(points, weights), lambda t: mixture(weights, [point(y, t) for y in points])


def gaussian_law(
    cov: list[list[float]], mean: list[float]
) -> tuple[es.Measure, Callable[[Sequence[float]], Exact]]:
    return es.Gaussian(cov, mean), lambda t: gaussian(cov, mean, t)


def two_gaussians(s: float) -> tuple[es.Measure, Callable[[Sequence[float]], Exact]]:
    """Means s and -s apart by far more than the deviations, which are those of sizes s / 10 and s /
    1000.
    """
    root = max(1e-45, min(s, 1e49))
    covs = [
        [[0.01 * root * root, 0.0], [0.0, 0.01 * root * root]],
        [[1e-6 * root * root, 0.0], [0.0, 0.0]],
    ]
    means = [[s, 0.0], [-s, 0.5 * s]]
    law = es.Mixture([1e-3, 1.0], [es.Gaussian(c, m) for c, m in zip(covs, means, strict=True)])
    return law, lambda t: mixture(
        [1e-3, 1.0], [gaussian(c, m, t) for c, m in zip(covs, means, strict=True)]
    )


LAWS: dict[str, Callable[[float], tuple[es.Measure, Callable[[Sequence[float]], Exact]]]] = {
    "gaussian": lambda s: gaussian_law([[s, 0.3 * s], [0.3 * s, s]], [0.0, 1.0]),
    "gaussian-singular": lambda s: gaussian_law([[s, -s], [-s, s]], [0.0, 0.0]),
    "gaussian-uneven": lambda s: gaussian_law([[s, 0.0], [0.0, 1.0 / s]], [1.0, 0.0]),
    "sphere": lambda s: (es.Sphere(2, s), lambda t: rotational(1.0, s, t)),
    "ball": lambda s: (es.Ball(2, s), lambda t: rotational(2.0, s, t)),
    "cube": lambda s: (es.Cube(2, s), lambda t: product(1.5, s, t)),
    "rademacher": lambda s: (es.Rademacher(2, s), lambda t: product(0.5, s, t)),
    "laplace": lambda s: (es.Laplace(2, s), lambda t: laplace(s, t)),
    "pool": lambda s: pool([[s, 0.0], [-0.5 * s, s], [0.25 * s, -s]], [1.0, 2.0, 3.0]),
    "mixture-far": two_gaussians,
    "mixture-mixed": lambda s: (
        es.Mixture([1.0, 3.0], [es.Sphere(2, s), es.Cube(2, 1.0)]),
        lambda t: mixture([1.0, 3.0], [rotational(1.0, s, t), product(1.5, 1.0, t)]),
    ),
}


def flat(value: Any) -> list[Any]:
    return [x for item in value for x in flat(item)] if isinstance(value, list) else [value]


def check(answer: Callable[[], torch.Tensor], exact: Any, where: tuple[Any, ...]) -> bool:
    """The answer to 1e-9 of its largest entry, or a refusal where the exact one is beyond float64.
    True when answered.
    """
    expected = flat(exact)
    largest = max(abs(x) for x in expected)
    try:
        got = flat(answer().tolist())
    except ValueError as refusal:
        held = largest < LARGEST
        text = str(refusal)
    else:
        for a, b in zip(got, expected, strict=True):
            assert math.isfinite(a), where
            floor = mpmath.mpf(10) ** (-14 if where[-1] == "K" else -300)
            assert abs(a - b) <= mpmath.mpf(10) ** -9 * largest + floor, (where, got, expected)
        return True
    assert not held, (where, text, expected)
    assert "leave the range" in text, text
    return False


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("size", SIZES)
def test_transform_and_moments_of_every_size(name: str, size: float) -> None:
    answered = 0
    with mpmath.workdps(700 if name.startswith(("mixture", "pool", "laplace")) else 60):
        law, exact = LAWS[name](size)
        for tilt in [0.0, *SIZES, 0.5 / size, 2.0 / size]:
            theta = [0.6 * tilt, -0.8 * tilt]
            if tilt * size > FAR and "gauss" not in name and name != "pool":
                continue
            if name == "laplace" and 0.8 * tilt * size >= 1.0:
                with pytest.raises(ValueError, match="has a limit only where"):
                    law.tilted_mean(theta)
                continue
            log, mean, cov = exact(theta)
            # a mixture's moments need its tilted weights, and those need K
            needs_log = law.__class__ in (es.Mixture, es.Pool) and abs(log) >= LARGEST
            answered += check(
                lambda theta=theta: law.log_laplace(theta), log, (name, size, tilt, "K")
            )  # type: ignore[misc]
            if needs_log or not all(math.isfinite(t) for t in theta):
                continue
            answered += check(
                lambda theta=theta: law.tilted_mean(theta), mean, (name, size, tilt, "mean")
            )  # type: ignore[misc]
            answered += check(
                lambda theta=theta: law.tilted_cov(theta), cov, (name, size, tilt, "cov")
            )  # type: ignore[misc]
        check(lambda: law.mean, exact([0.0, 0.0])[1], (name, size, "mean"))
        check(lambda: law.cov, exact([0.0, 0.0])[2], (name, size, "cov"))
    assert answered > 5


@pytest.mark.parametrize("dim", [1, 4096])
@pytest.mark.parametrize("ball", [False, True])
@pytest.mark.parametrize("radius", [1e-90, 1e-20, 1.0, 1e20, 1e90])
def test_rotational_laws_of_one_and_many_dimensions(dim: int, ball: bool, radius: float) -> None:
    law = (es.Ball if ball else es.Sphere)(dim, radius)
    with mpmath.workdps(60):
        for tilt in [1e-90, 1.0, 1e3, 1e30, 1.0 / radius, 64.0 / radius]:
            theta = torch.zeros(dim, dtype=torch.float64)
            theta[-1] = tilt
            log, mean, cov = rotational(law.order, radius, [tilt])
            check(lambda theta=theta: law.log_laplace(theta), log, (dim, radius, tilt))  # type: ignore[misc]
            check(lambda theta=theta: law.tilted_mean(theta)[-1:], mean, (dim, radius, tilt))  # type: ignore[misc]
            if dim == 1:
                check(lambda theta=theta: law.tilted_cov(theta), cov, (dim, radius, tilt))  # type: ignore[misc]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in LAWS
        if name not in ("laplace", "mixture-far", "mixture-mixed") and "gauss" not in name
    ],
)
def test_extremes_do_not_depend_on_the_size_of_the_tilt(name: str) -> None:
    for size in SIZES:
        law, _ = LAWS[name](size)
        expected = law.extreme([0.6, -0.8])
        for tilt in SIZES:
            got = law.extreme([0.6 * tilt, -0.8 * tilt])
            torch.testing.assert_close(got / size, expected / size, rtol=1e-14, atol=0)
        reference = LAWS[name](1.0)[0].extreme([0.6, -0.8])
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
        law = es.Pool([[1.0], [3.0]], [size, size])
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
