"""The uniform error with a proved constant: Dudley's sum, the pieces of the proof, and the bound
above what is measured.
"""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch

import esscher as es
from esscher.errors.exact import delta_trace
from esscher.errors.montecarlo.converge import uniform_error
from esscher.theory.sharp import chaining_constant, dudley_sum, gaussian_uniform_constant


def eye(d: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.eye(d, dtype=torch.float64)


def bound_of(
    head: es.Head, law: es.Measure, radius: float, name: str = "uniform-chaining"
) -> es.Prediction:
    (found,) = (p for p in es.predictions(head, law, radius=radius) if p.name == name)
    return found


@pytest.mark.parametrize("dim", [1, 4, 50])
def test_the_sum_of_the_chain(dim: int) -> None:
    with mpmath.workdps(30):
        exact = mpmath.nsum(
            lambda j: (
                2 ** (1 - j)
                * mpmath.sqrt(2 * mpmath.log(2 * (1 + mpmath.mpf(2) ** (j + 1)) ** dim))
            ),
            [1, mpmath.inf],
        )
    assert dudley_sum(dim) == pytest.approx(float(exact), rel=1e-12)


def test_the_largest_of_many_norms_of_sums_of_signs() -> None:
    """Step 3: E max over N of |sum eps_i a_i| <= sqrt(2 log 2N) (sum |a_i|^2)^{1/2}, over all 2^10
    signs, without sampling.
    """
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(40, 10, 3, dtype=torch.float64, generator=generator)
    a = a / a.square().sum((1, 2), keepdim=True).sqrt()
    signs = torch.tensor(
        [[1.0 - 2.0 * (i >> j & 1) for j in range(10)] for i in range(1 << 10)]
    ).double()
    norms = torch.einsum("sj,njd->snd", signs, a).norm(dim=2)
    assert float(norms.amax(1).mean()) <= math.sqrt(2 * math.log(80))
    for rate in (0.3, 1.0, 3.0):
        assert float(torch.cosh(rate * norms).mean(0).max()) <= math.exp(rate**2 / 2)


@pytest.mark.parametrize(
    "law", [es.Sphere(3, 1.5), es.Ball(3, 1.5), es.Cube(2, 1.0), es.Rademacher(2)]
)
def test_weights_and_slopes_stay_below_the_bounds_of_the_proof(law: es.Measure) -> None:
    """M over tokens and tilts, and the derivative of w V (y - m) in theta by autograd against 4 |V|
    R^2 M.
    """
    head, r = es.Head(eye(law.dim, 0.8), eye(law.dim, 2.0)), 1.7
    reach, generator = law.support_radius(), torch.Generator().manual_seed(1)
    assert reach is not None
    peak = 0.8 * r * reach
    if isinstance(law, es.Sphere | es.Ball):
        peak -= float(law.log_laplace(torch.tensor([0.8 * r] + [0.0] * (law.dim - 1)).double()))
    tokens = law.sample(60, generator).double()
    directions = es.Sphere(law.dim).sample(12, generator).double()
    for theta in 0.8 * r * directions:
        w = torch.exp(tokens @ theta - law.log_laplace(theta))
        assert float(w.max()) <= math.exp(peak) * (1 + 1e-12)
        for y in tokens[:5]:

            def g(t: torch.Tensor, y: torch.Tensor = y) -> torch.Tensor:
                return torch.exp(t @ y - law.log_laplace(t)) * head.values(y - law.tilted_mean(t))

            slope = torch.autograd.functional.jacobian(g, theta)
            assert float(torch.linalg.matrix_norm(slope, 2)) <= 4 * 2.0 * reach**2 * math.exp(
                peak
            ) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("law", "n"), [(es.Sphere(2, 1.0), 20), (es.Ball(2, 2.0), 50), (es.Rademacher(2, 0.7), 30)]
)
def test_the_bound_lies_above_the_measured_uniform_error(law: es.Measure, n: int) -> None:
    """The mean of some draws; at large n the constant is compared through the delta method."""
    head = es.Head(eye(2), eye(2))
    generator = torch.Generator().manual_seed(2)
    found = [
        uniform_error(head, law, law.sample(n, generator), 1.0, generator)[0] for _ in range(4)
    ]
    bound = bound_of(head, law, 1.0)
    assert bound.applies
    assert np.mean(found) <= float(bound.rms([n])[0])
    x = torch.tensor([[1.0, 0.0]]).double()
    assert math.sqrt(float(delta_trace(head, law, x)[0])) <= bound.numbers["constant"]


def test_the_constant_of_a_sphere_is_not_exponential_in_the_score() -> None:
    """C ~ R R^2 M, M = exp(R^2) / (sinh(R^2)/R^2) ~ 2 R^2."""
    head = es.Head(eye(3), eye(3))
    small, large = (bound_of(head, es.Sphere(3, R), R).numbers["constant"] for R in (4.0, 8.0))
    assert math.log2(large / small) == pytest.approx(5, abs=0.05)


def test_the_best_share_is_taken() -> None:
    """(sqrt(P) + sqrt(Q))^2 is the least of P/a + Q/(1-a)."""
    score, log_peak, value, spread, dim = 1.3, 0.4, 2.0, 1.1, 3
    chain = math.exp(log_peak) * score * dudley_sum(dim)
    P, Q = 2 * spread + 8 * value * chain, 2 * value * 4 * chain
    shares = np.linspace(0.001, 0.999, 9999)
    assert chaining_constant(score, log_peak, value, spread, dim) == pytest.approx(
        (P / shares + Q / (1 - shares)).min(), rel=1e-6
    )


def test_where_it_does_not_apply_it_says_so() -> None:
    gaussian = bound_of(es.Head(eye(2), eye(2)), es.Gaussian(eye(2)), 1.0)
    assert not gaussian.applies
    assert gaussian.unmet == ("tokens have bounded support",)
    biased = bound_of(es.Head(eye(2), eye(2), torch.ones(2).double()), es.Sphere(2), 1.0)
    assert biased.unmet == ("the head has no tilt bias",)
    assert gaussian.value is None


@pytest.mark.parametrize("h", [0.3, 0.8, 1.3])
def test_gaussian_tokens_stay_below_their_constant(h: float) -> None:
    """On a line, where the supremum over 401 queries is nearly all of it: the numerator's and the
    denominator's mean squares of the proof, and the error itself, 400 draws of n = 60 and 600.
    """
    x, generator = np.linspace(-1, 1, 401), np.random.default_rng(0)
    head, law = es.Head(eye(1, h), eye(1)), es.Gaussian(eye(1))
    bound = bound_of(head, law, 1.0, "uniform-gaussian")
    assert bound.applies
    squared = min(
        math.exp(h**2 / s2) * (1 - 2 * s2) ** -0.5 for s2 in np.linspace(0.01, 0.499, 200)
    )
    for n in (60, 600):
        g = generator.standard_normal((400, n))
        weight = np.exp(h * x[:, None, None] * g - (h * x[:, None, None]) ** 2 / 2)
        mean = weight.mean(2)
        assert n * np.square(mean - 1).max(0).mean() <= squared
        error = np.abs((weight * g).mean(2) / mean - h * x[:, None]).max(0)
        assert error.mean() <= bound.value([n])[0]


def test_the_gaussian_constant_grows_as_the_paper_says() -> None:
    """log C / h^2 -> 1, and never below it; no tilt, no growth."""
    logs = [
        math.log(gaussian_uniform_constant(h, 2.0, 1.0, 3.0, h)) / h**2 for h in (5.0, 10.0, 25.0)
    ]
    assert logs[0] > logs[1] > logs[2] > 1
    assert logs[2] < 1.05
    assert 1 < gaussian_uniform_constant(0.0, 1.0, 0.0, 1.0, 0.0) < 7


def test_the_gaussian_constant_of_a_head_that_sees_some_directions() -> None:
    """Score and value maps apart, singular tokens: the numbers from their definitions."""
    A, V = torch.zeros(3, 3).double(), torch.diag(torch.tensor([1.0, 2.0, 3.0])).double()
    A[0, 0], A[1, 1] = 0.5, 0.2
    law = es.Gaussian(torch.diag(torch.tensor([4.0, 1.0, 0.25])).double())
    found = bound_of(es.Head(A, V), law, 2.0, "uniform-gaussian").numbers
    truth = {"horizon": 2.0, "rank": 2, "along": 8.0, "spread": 8 + 2.25 / 1, "limit": 4.0}
    assert {key: found[key] for key in truth} == pytest.approx(truth)
