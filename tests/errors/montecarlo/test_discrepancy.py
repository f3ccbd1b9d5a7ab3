"""Each metric on one draw against another road to it: autograd, finite differences, brute force,
explicit softmax.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import esscher as es
from esscher.errors.montecarlo.converge import (
    Plan,
    error_and_gradient,
    uniform_error,
)
from tests.attention.reference import attend_tokens, softmax_attention

LADDER = (7, 19, 53)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def head_for(d: int, size: float = 0.5) -> es.Head:
    return es.Head(
        size * randn(d, d, seed=1), randn(2, d, seed=2), 0.2 * randn(d, seed=3), randn(2, seed=4)
    )


def squared(made: Plan, metric: str) -> np.ndarray:
    return made.repeat(0)[metric][0]


LAWS = [
    pytest.param(lambda: es.Gaussian(randn(3, 3) @ randn(3, 3).T, randn(3, seed=9)), id="gaussian"),
    pytest.param(lambda: es.Sphere(3, 1.5), id="sphere"),
    pytest.param(lambda: es.Pool(randn(80, 3, seed=5)), id="pool"),
]


@pytest.mark.parametrize("make", LAWS)
def test_moments_are_those_of_explicit_self_attention(make: object) -> None:
    law = make()  # type: ignore[operator]
    head = head_for(3)
    made = Plan(head, law, LADDER, ("mean", "cov"), dtype=torch.float64)
    (draw,) = made.draws(0)
    found = made.repeat(0)
    push = es.limit(head, law).pushforward()
    for i, n in enumerate(LADDER):
        y = draw.tokens[:n]
        out = softmax_attention(head.queries(y), head.keys(y), head.values(y), 1.0)
        error = torch.cov(out.T, correction=0) - push.cov
        assert found["mean"][0][i] == pytest.approx(
            float((out.mean(0) - push.mean).square().sum()), rel=1e-9
        )
        assert found["cov"][0][i] == pytest.approx(float(error.square().sum()), rel=1e-9)
    assert found["cov"][1] == pytest.approx(float(push.cov.square().sum()))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("make", LAWS)
def test_l2_is_that_of_explicit_attention(make: object, inside: bool) -> None:
    law = make()  # type: ignore[operator]
    head = head_for(3)
    made = Plan(head, law, LADDER, "l2", dtype=torch.float64, queries=11, query_inside=inside)
    (draw,) = made.draws(0)
    x = draw.queries
    assert x.shape == (11, 3)
    limit = es.limit(head, law)(x)
    expected = [
        attend_tokens(head, x, draw.tokens[:n], query_inside=inside) - limit for n in LADDER
    ]
    assert squared(made, "l2") == pytest.approx(
        [float(e.square().sum(1).mean()) for e in expected], rel=1e-9
    )


@pytest.mark.parametrize("make", LAWS)
def test_gradient_of_the_error_is_its_derivative(make: object) -> None:
    law = make()  # type: ignore[operator]
    head, y, x, step = (
        head_for(3),
        law.sample(31, torch.Generator().manual_seed(1)),
        randn(6, 3, seed=7),
        1e-5,
    )
    height, slope = error_and_gradient(head, law, y, x)

    def half_square(rows: torch.Tensor) -> torch.Tensor:
        error = attend_tokens(head, rows, y) - es.limit(head, law)(rows)
        return 0.5 * error.square().sum(1)

    assert torch.allclose(height, half_square(x), rtol=1e-10)
    for i in range(3):
        nudge = step * torch.eye(3).double()[i]
        numeric = (half_square(x + nudge) - half_square(x - nudge)) / (2 * step)
        assert torch.allclose(slope[:, i], numeric, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("size", [0.5, 2.0])
@pytest.mark.parametrize("d", [1, 2])
def test_uniform_error_is_that_of_brute_force(d: int, size: float) -> None:
    """Against a fine grid of the ball: never below it by more than 1e-6, above it only by what the
    grid misses.
    """
    head = es.Head(
        size * (torch.eye(d).double() + 0.3 * randn(d, d, seed=1)),
        randn(2, d, seed=2),
        0.2 * randn(d, seed=3),
    )
    radius = 2.0
    if d == 1:
        grid = torch.linspace(-radius, radius, 4001, dtype=torch.float64)[:, None]
    else:
        r, angle = torch.meshgrid(
            torch.linspace(0, radius, 41), torch.linspace(0, 2 * math.pi, 241), indexing="ij"
        )
        grid = torch.stack([r * angle.cos(), r * angle.sin()], -1).reshape(-1, 2).double()
    for law in (
        es.Gaussian(torch.eye(d).double()),
        es.Mixture([0.6, 0.4], [es.Cube(d), es.Ball(d, 2.0)]),
    ):
        limit = es.limit(head, law)
        y = law.sample(30, torch.Generator().manual_seed(4))
        error, point = uniform_error(head, law, y, radius, torch.Generator().manual_seed(5))
        brute = float((attend_tokens(head, grid, y) - limit(grid)).norm(dim=1).max())
        assert brute * (1 - 1e-6) <= error <= brute * (1 + 2e-3)
        assert float(point.norm()) <= radius * (1 + 1e-12)
        there = attend_tokens(head, point[None], y) - limit(point[None])
        assert float(there.norm()) == pytest.approx(error, rel=1e-9)


def test_uniform_error_in_many_dimensions_does_not_depend_on_the_random_starts() -> None:
    d = 20
    law, head = (
        es.Gaussian(torch.eye(d).double()),
        es.Head(0.15 * torch.eye(d).double(), torch.eye(d).double()),
    )
    y = law.sample(200, torch.Generator().manual_seed(0))
    errors = [
        uniform_error(head, law, y, 5.0, torch.Generator().manual_seed(seed))[0]
        for seed in range(4)
    ]
    assert max(errors) == pytest.approx(min(errors), rel=1e-6)
    many = 5.0 * torch.nn.functional.normalize(randn(20_000, d, seed=8))
    assert float(
        (attend_tokens(head, many, y) - es.limit(head, law)(many)).norm(dim=1).max()
    ) <= min(errors)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_hardmax_on_the_line_is_that_of_attend_hardmax(sign: float) -> None:
    head = es.Head([[sign * 0.7]], [[-1.3], [0.4]], value_bias=[3.0, 1.0])
    (draw,) = Plan(head, es.Gaussian([[4.0]]), LADDER, "hardmax", dtype=torch.float64).draws(0)
    for at, n in enumerate(LADDER):
        out = attend_tokens(head, draw.tokens[:n], draw.tokens[:n], kernel="hardmax")
        error = out.mean(0) - torch.tensor([3.0, 1.0])
        assert squared(draw.plan, "hardmax")[at] == pytest.approx(
            float(error.square().sum()), rel=1e-9
        )


def test_hardmax_of_a_bounded_law_goes_to_its_limit() -> None:
    """On {-1, 1}^2 the furthest corner is among 53 tokens but for a chance of 1e-6."""
    found = squared(
        Plan(head_for(2), es.Rademacher(2), LADDER, "hardmax", dtype=torch.float64),
        "hardmax",
    )
    assert found[-1] == pytest.approx(0.0, abs=1e-20)
    x = randn(9, 3, seed=4)
    made = Plan(head_for(3), es.Ball(3), LADDER, "hardmax", dtype=torch.float64, queries=x)
    (draw,) = made.draws(0)
    limit = es.hardmax_limit(head_for(3), es.Ball(3))(x)
    errors = [
        attend_tokens(head_for(3), x, draw.tokens[:n], kernel="hardmax") - limit for n in LADDER
    ]
    assert squared(made, "hardmax") == pytest.approx(
        [float(e.square().sum(1).mean()) for e in errors]
    )
