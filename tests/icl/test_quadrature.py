"""The numerics under the risks: the law of s, the table of f1 and f2, the cubature, the Bayes
risk.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.stats import chi2

import esscher as es
from esscher.errors.gaussian import gaussian_error_slopes
from esscher.icl import Block, LinearTask
from esscher.icl.exact import bayes_risk
from esscher.icl.quadrature import error_functions, gaussian_cubature, score_law
from esscher.icl.training import sampled_risk
from tests.icl.other_task import OtherTask

Floats = npt.NDArray[np.float64]


@pytest.mark.parametrize("d", [1, 2, 5, 20, 50])
def test_score_law_of_the_identity_is_chi(d: int) -> None:
    law = score_law(np.eye(d) * 2.25)
    s = law.s / 1.5
    density = chi2.pdf(s**2, d) * 2 * s**2 * np.log(s[1] / s[0])
    accuracy = 1e-10 if d <= 20 else 1e-8
    assert np.abs(law.one - density)[1:].max() < accuracy
    assert law.one @ law.s**2 == pytest.approx(2.25 * d, rel=accuracy)
    assert np.allclose(law.square.T @ law.s**2, 2.25 * (d + 2), rtol=accuracy)


@pytest.mark.parametrize("values", [[1.0, 0.3, 0.01], [4.0, 1e-7, 0.0], [1.0, 1.0, 1e-3]])
def test_score_law_moments(values: list[float]) -> None:
    """Moments of quadratic forms in closed form, in a turned basis, with small and zero
    eigenvalues.
    """
    rng = np.random.default_rng(0)
    turn = np.linalg.qr(rng.standard_normal((3, 3)))[0]
    law = score_law(turn @ np.diag(values) @ turn.T)
    lam = np.sort(values)
    total, square = lam.sum(), (lam**2).sum()
    assert law.one.sum() == pytest.approx(1, abs=1e-12)
    assert law.one @ law.s**2 == pytest.approx(total, rel=1e-9)
    assert law.one @ law.s**4 == pytest.approx(total**2 + 2 * square, rel=1e-9)
    assert np.allclose(law.square.T @ law.s**2, total + 2 * lam, rtol=1e-9)
    pair = np.einsum("t,tij->ij", law.s**2, law.pair)
    # a third of the moment on the diagonal
    assert np.allclose(pair, total + 2 * lam[:, None] + 2 * lam, rtol=1e-9)
    laplace = law.one @ np.exp(-0.7 * law.s**2)
    assert laplace == pytest.approx(np.prod(1 + 1.4 * lam) ** -0.5, rel=1e-10)


def test_score_law_of_nothing() -> None:
    law = score_law(np.zeros((3, 3)))
    assert law.s.tolist() == [0.0]
    assert law.one.tolist() == [1.0]


@pytest.mark.parametrize("n", [1, 2, 10, 10**6])
def test_table_equals_the_function(n: int) -> None:
    s = np.concatenate([[0.0, 0.5, 1.0], np.random.default_rng(0).uniform(0, 12, 60)])
    exact = gaussian_error_slopes(n, s)
    f1, f2, df1, df2 = error_functions(n, s)
    assert np.allclose(f1, exact.f1, rtol=1e-9)
    assert np.allclose(f2, exact.f2, rtol=1e-9)
    h = 1e-3  # differences of fourth order; both functions are even in s
    at = {k: gaussian_error_slopes(n, np.abs(s + k * h)) for k in (-2, -1, 1, 2)}
    for name, slope in (("f1", df1), ("f2", df2)):
        near, far = (getattr(at[k], name) - getattr(at[-k], name) for k in (1, 2))
        size = getattr(exact, name).max()
        assert np.allclose(slope, (8 * near - far) / (12 * h), rtol=1e-6, atol=1e-8 * size)


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 8])
def test_cubature_is_exact_to_degree_five(dim: int) -> None:
    rule = gaussian_cubature(dim, rotations=3, shells=6)
    g, weights = rule.points, rule.weights
    first = g[..., 0]
    moments = {0: 1.0, 1: 0.0, 2: 1.0, 3: 0.0, 4: 3.0, 5: 0.0}
    for power, wanted in moments.items():
        assert torch.allclose(
            (first**power) @ weights, torch.tensor(wanted, dtype=torch.float64), atol=1e-10
        )
    if dim > 1:
        assert torch.allclose(
            (first**2 * g[..., 1] ** 2) @ weights, torch.tensor(1.0, dtype=torch.float64)
        )
        assert torch.allclose(
            (first**3 * g[..., 1]) @ weights, torch.tensor(0.0, dtype=torch.float64), atol=1e-10
        )
    even = gaussian_cubature(dim, rotations=3, shells=6, even=True)
    assert even.points.shape[1] * 2 == g.shape[1]
    assert torch.allclose(
        even.points[..., 0] ** 4 @ even.weights, torch.tensor(3.0, dtype=torch.float64)
    )


def ridge_loss(task: LinearTask, length: int, prompts: int, generator: torch.Generator) -> Floats:
    """Squared error of ridge regression done prompt by prompt."""
    batch = task.sample(prompts, length, generator)
    x, y = batch.tokens[..., :-1], batch.tokens[..., -1:]
    gram = x.mT @ x + task.noise * torch.linalg.inv(task.task_cov)
    w = torch.linalg.solve(gram, x.mT @ y)[..., 0]
    return np.asarray(0.5 * ((w * batch.query).sum(-1) - batch.target) ** 2)


@pytest.mark.parametrize("length", [1, 2, 3, 11])
def test_bayes_risk_is_that_of_ridge_regression(length: int, generator: torch.Generator) -> None:
    """Within 4 standard errors, lengths below and above the dimension: false alarm below 3e-4."""
    task = LinearTask(
        [[1.0, 0.4, 0.0], [0.4, 0.7, 0.2], [0.0, 0.2, 0.5]], np.diag([0.3, 0.6, 0.2]), 0.15
    )
    loss = ridge_loss(task, length, 40_000, generator)
    best = bayes_risk(task, length, generator=generator)
    assert abs(loss.mean() - best.value) < 4 * math.hypot(loss.std() / 200, best.error)


def test_bayes_risk_at_the_ends(generator: torch.Generator) -> None:
    task = LinearTask.kms(3, noise=0)
    assert bayes_risk(task, math.inf).value == 0
    assert bayes_risk(task, 3, generator=generator).value == pytest.approx(0, abs=1e-9)
    one = bayes_risk(LinearTask([[2.0]], [[0.5]], 0), 1, generator=generator)
    assert one.value == pytest.approx(0, abs=1e-12)
    singular = LinearTask(np.diag([1.0, 1.0, 0.0]), np.eye(3), 0)
    # one of two directions left
    assert bayes_risk(singular, 1, generator=generator).value == pytest.approx(0.5, rel=0.05)
    noisy = LinearTask.isotropic(5)
    assert bayes_risk(noisy, 10**12, generator=generator).value == pytest.approx(0.05, abs=1e-9)
    # (tau^2 / 2) d / L is the leading term, whatever Sigma and W are.
    assert bayes_risk(noisy, 10**6, generator=generator).value - 0.05 == pytest.approx(
        0.05 * 5 / 10**6, rel=1e-3
    )
    with pytest.raises(ValueError, match="length: expected whole numbers"):
        bayes_risk(noisy, 0.5)


def test_softmax_learns_an_even_link_that_linear_attention_cannot(
    generator: torch.Generator,
) -> None:
    """y = cos(w x): the softmax limit is v exp(-w^2/2) cos(w u x), that of linear attention 0.
    Separations of 3 errors.
    """
    task = OtherTask(es.Gaussian([[1.0]]), torch.cos, noise=0.0, variance=2.0)
    blind, tuned = (
        sampled_risk(task, Block([[u]], 1.4), 300, "softmax", 4000, generator) for u in (0.0, 1.0)
    )
    linear = sampled_risk(task, Block([[1.0]], 1.4), 300, "linear", 4000, generator)
    zero = sampled_risk(task, Block([[1.0]], 0.0), 300, "linear", 4000, generator)
    assert tuned.value < blind.value - 3 * math.hypot(tuned.error, blind.error)
    assert tuned.value < zero.value - 3 * math.hypot(tuned.error, zero.error)
    assert linear.value > zero.value - 3 * math.hypot(linear.error, zero.error)


def test_the_limit_is_not_linear_for_rademacher_covariates(generator: torch.Generator) -> None:
    """v <w, tanh(u x)> with x = +-1: the best v is 1/tanh(u), not 1/u."""
    task = OtherTask(es.Rademacher(2))
    tuned = sampled_risk(
        task, Block(0.8 * np.eye(2), 1 / math.tanh(0.8)), 2000, "softmax", 500, generator
    )
    gaussian = sampled_risk(task, Block(0.8 * np.eye(2), 1 / 0.8), 2000, "softmax", 500, generator)
    assert tuned.value < gaussian.value
    assert tuned.value == pytest.approx(0.05, abs=5 * tuned.error + 0.005)
