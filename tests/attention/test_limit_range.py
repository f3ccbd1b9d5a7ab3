"""Limits, pushforwards and horizons of heads and laws of any size: scaling laws hold, or the answer
is refused.
"""

from __future__ import annotations

import math

import pytest
import torch

import esscher as es


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


A, V, X = randn(3, 3, seed=1), randn(2, 3, seed=2), randn(4, 3, seed=3)
FACTOR = randn(3, 3, seed=4)
COV = FACTOR @ FACTOR.T
SIZES = [1e-90, 1e-45, 1e45, 1e90]


def law(name: str, size: float) -> es.Measure:
    return {
        "gaussian": lambda: es.Gaussian(size * (size * COV)),
        "sphere": lambda: es.Sphere(3, size),
        "ball": lambda: es.Ball(3, size),
        "cube": lambda: es.Cube(3, size),
        "rademacher": lambda: es.Rademacher(3, size),
        "pool": lambda: es.Pool(size * randn(11, 3, seed=5)),
    }[name]()


@pytest.mark.parametrize("name", ["gaussian", "sphere", "ball", "cube", "rademacher", "pool"])
@pytest.mark.parametrize("size", SIZES)
def test_limits_scale_with_the_tokens(name: str, size: float) -> None:
    """Tokens s y and scores A / s have the limit s Gamma, whatever s is; for Gaussians s^2 must be
    in range.
    """
    if name == "gaussian" and not 1e-50 < size < 1e50:
        return
    expected = es.limit(es.Head(A, V), law(name, 1.0))(X)
    out = es.limit(es.Head(A / size, V), law(name, size))(X)
    torch.testing.assert_close(out / size, expected, rtol=1e-9, atol=1e-12)
    small = es.limit(es.Head(A / size, V / size), law(name, size))(X.float())
    torch.testing.assert_close(
        small.double(),
        es.limit(es.Head(A, V), law(name, 1.0))(X.float().double()),
        rtol=1e-5,
        atol=1e-5,
    )
    if name in ("sphere", "ball", "cube", "rademacher", "pool"):
        hard = es.hardmax_limit(es.Head(A / size, V / size), law(name, size))(X)
        torch.testing.assert_close(
            hard, es.hardmax_limit(es.Head(A, V), law(name, 1.0))(X), rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("name", ["sphere", "ball"])
@pytest.mark.parametrize("size", [1e-45, 1e-20, 1e20, 1e45])
def test_rotational_pushforwards_scale_with_the_tokens(name: str, size: float) -> None:
    """Queries are tokens too: with A / s^2 and V / s the outputs have one law for every s."""
    expected = es.limit(es.Head(A, V), law(name, 1.0)).pushforward()
    found = es.limit(es.Head(A / size / size, V / size), law(name, size)).pushforward()
    torch.testing.assert_close(found.cov, expected.cov, rtol=1e-9, atol=1e-12)
    # the tilted mean is at the edge
    endless = es.limit(es.Head(1e90 * A, V), law(name, 1.0)).pushforward()
    torch.testing.assert_close(
        endless.cov,
        es.limit(es.Head(1e15 * A, V), law(name, 1.0)).pushforward().cov,
        rtol=1e-6,
        atol=1e-9,
    )


@pytest.mark.parametrize("size", [1e-90, 1e90])
def test_horizons_of_any_size(size: float) -> None:
    key, query = COV, torch.eye(3, dtype=torch.float64) + 0.1 * COV
    expected = es.horizon_of_covariances(key, query)
    assert es.horizon_of_covariances(size * key, query / size) == pytest.approx(expected, rel=1e-10)
    assert es.horizon_of_covariances(size * key, query) == pytest.approx(
        math.sqrt(size) * expected, rel=1e-10
    )
    head = es.Head(A / math.sqrt(size), V)
    assert head.horizon(es.Gaussian(size * COV), sided=1) == pytest.approx(
        es.Head(A, V).horizon(es.Gaussian(COV), 1), rel=1e-10
    )
    assert head.coupling(es.Gaussian(size * COV)) / size == pytest.approx(
        es.Head(A, V).coupling(es.Gaussian(COV)), rel=1e-9
    )


def test_what_does_not_fit_is_refused() -> None:
    huge, head = es.Gaussian(1e95 * COV), es.Head(1e95 * A, V)
    for broken in (
        lambda: es.Head(1e120 * A, V),
        lambda: es.limit(head, huge)(1e95 * X),
        lambda: es.limit(head, huge).pushforward(),
        lambda: es.linear_limit(head, huge).pushforward(),
        lambda: es.limit(head, es.Sphere(3, 1e98)).pushforward(),
        lambda: es.limit(es.Head(A, V), es.Gaussian(1e6 * COV))(X.half()),
        lambda: es.Head(99 * A.float(), V.float()).queries(1e38 * X.float()),
    ):
        with pytest.raises(ValueError, match=r"leave the range of|sizes up to 1e100"):
            broken()
