"""Exact curves over a law of queries: against quadrature, known densities, and many drawn
queries.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

import esscher as es
from esscher.errors.gaussian import _frozen, gaussian_error


def eye(d: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.eye(d, dtype=torch.float64)


def isotropic_rms(d: int, horizon: float, n: int) -> float:
    """By adaptive quadrature over s / h ~ chi_d, panel by panel."""

    def density(s: float) -> float:
        f1, f2 = gaussian_error(n, horizon * s)
        return float(stats.chi.pdf(s, d)) * (float(f1) + (d - 1) * float(f2))

    ends = np.linspace(0.0, math.sqrt(d) + 14.0, 40)
    parts = [
        integrate.quad(density, a, b, epsabs=0, epsrel=1e-10)[0]
        for a, b in itertools.pairwise(ends)
    ]
    return math.sqrt(sum(parts))


@pytest.mark.parametrize(
    ("d", "horizon", "n"), [(1, 1.0, 10**9), (1, 0.5, 10**15), (3, 1.5, 10**6), (50, 0.3, 10**4)]
)
def test_isotropic_gaussian_queries_against_quadrature(d: int, horizon: float, n: int) -> None:
    law = es.Gaussian(eye(d))
    curve = es.exact_curve(es.Head(eye(d, horizon), eye(d)), law, law, [n])
    assert curve.rms[0] == pytest.approx(isotropic_rms(d, horizon, n), rel=1e-10)
    assert curve.accuracy <= 1e-10
    assert curve.query_stderr[0] == 0.0


def test_slope_over_gaussian_queries() -> None:
    """The slope against the logarithmic difference quotient of the integrated curve itself."""
    law, n = es.Gaussian([[1.0]]), 10**9
    near = [n - 10**5, n, n + 10**5]
    curve = es.exact_curve(es.Head([[1.0]], [[1.0]]), law, law, near)
    quotient = math.log(curve.rms[2] / curve.rms[0]) / math.log(near[2] / near[0])
    assert curve.slope is not None
    assert curve.slope[1] == pytest.approx(quotient, rel=1e-6)


@pytest.mark.parametrize("mean", [0.1, 2.3, 30.0])
def test_isotropic_gaussian_queries_with_a_mean_against_quadrature(mean: float) -> None:
    """Over the noncentral chi-square law of s^2, d = 3, V = 1: s alone counts."""
    offset = torch.tensor([0.0, mean, 0.0], dtype=torch.float64)
    law, n = es.Gaussian(eye(3)), 1000
    curve = es.exact_curve(es.Head(eye(3), eye(3)), law, es.Gaussian(eye(3), offset), [n])

    def error(t: float) -> float:
        f1, f2 = gaussian_error(n, math.sqrt(t))
        return float(f1) + 2 * float(f2)

    ends = np.linspace(max(0.0, mean - 10.0), mean + 11.0, 60) ** 2
    parts = [
        integrate.quad(
            lambda t: float(stats.ncx2.pdf(t, 3, mean**2)) * error(t), a, b, epsabs=0, epsrel=1e-10
        )[0]
        for a, b in itertools.pairwise(ends)
    ]
    assert curve.rms[0] == pytest.approx(math.sqrt(sum(parts)), rel=1e-7)


@pytest.mark.parametrize("ratio", [1.0, 0.1, 0.01, 0.003, 1e-6, 1e-13])
def test_gaussian_queries_with_a_mean_and_unequal_variances(ratio: float) -> None:
    """Against a product of two Gauss-Hermite rules over the queries, for every ratio of variances
    down to a law on a line.
    """
    variances, mean, n = 0.1 * np.array([1.0, ratio]), np.array([0.5, 0.5]), [1, 100, 10**6]
    queries = es.Gaussian(torch.diag(torch.from_numpy(variances)), torch.from_numpy(mean))
    head = es.Head(eye(2), torch.tensor([[1.0, 0.3], [-0.5, 2.0]], dtype=torch.float64))
    found = es.exact_curve(head, es.Gaussian(eye(2)), queries, n)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    rows = np.stack(np.meshgrid(nodes, nodes, indexing="ij"), axis=-1).reshape(-1, 2)
    rows = mean + np.sqrt(variances) * rows
    s = np.sqrt((rows**2).sum(1))
    f1, f2 = gaussian_error(np.array(n)[None, :], s[:, None])
    V = head.V.numpy()
    along = ((rows @ V.T) ** 2).sum(1) / s**2
    mse = along[:, None] * f1 + ((V**2).sum() - along)[:, None] * f2
    expected = np.outer(weights, weights).ravel() @ mse / weights.sum() ** 2
    np.testing.assert_allclose(found.rms, np.sqrt(expected), rtol=1e-9)
    assert found.kind == "exact"
    assert found.accuracy < 1e-10
    assert (found.query_stderr == 0).all()


def test_a_law_of_queries_that_is_not_integrated_well_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Too few nodes allowed for a mean."""
    monkeypatch.setattr("esscher.errors.gaussian.MOST", 40)
    law = es.Gaussian(eye(2))
    queries = es.Gaussian(torch.diag(torch.tensor([1.0, 0.3], dtype=torch.float64)), [1.0, 0.0])
    curve = es.exact_curve(es.Head(eye(2), eye(2)), law, queries, [10])
    assert "queries drawn" in curve.origin
    assert curve.query_stderr[0] > 0


@pytest.mark.parametrize("centred", [True, False])
def test_any_head_and_gaussian_queries_against_drawn_ones(
    centred: bool, generator: torch.Generator
) -> None:
    """A not square, V not square, singular queries, means and biases; 4000 queries, 5 standard
    errors (1e-6 false alarms).
    """

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    root, narrow = 0.5 * noise(4, 4), noise(3, 2)
    law = es.Gaussian(root @ root.T, noise(4))
    queries = es.Gaussian(narrow @ narrow.T, None if centred else noise(3))
    head = es.Head(0.4 * noise(4, 3), noise(2, 4), None if centred else 0.3 * noise(4), noise(2))
    n = [1, 10, 1000]
    found = es.exact_curve(head, law, queries, n)
    drawn = es.exact_curve(head, law, queries.sample(4000, generator), n)
    assert drawn.queries is not None
    error = drawn.queries.mse.std(axis=0) / math.sqrt(4000)
    assert (np.abs(found.rms**2 - drawn.rms**2) < 5 * error).all()
    assert found.accuracy <= 1e-10
    assert found.scale == pytest.approx(drawn.scale, rel=0.05)
    np.testing.assert_allclose(found.slope, drawn.slope, atol=0.02)
    np.testing.assert_allclose(found.effective_tokens, drawn.effective_tokens, rtol=0.1)


def test_delta_of_gaussian_queries() -> None:
    """d = 1: E exp(s^2)(1 + s^2) at horizon h is (1 - 2h^2)^(-1/2) (1 + h^2/(1 - 2h^2))."""
    h, law = 0.5, es.Gaussian([[1.0]])
    curve = es.exact_curve(es.Head([[h]], [[1.0]]), law, law, [1000])
    assert curve.delta == pytest.approx(
        (1 - 2 * h**2) ** -0.5 * (1 + h**2 / (1 - 2 * h**2)), rel=1e-12
    )
    assert es.exact_curve(es.Head([[1.0]], [[1.0]]), law, law, [10]).delta == math.inf


def test_errors_beyond_the_largest_score_deviation() -> None:
    """n = 1: 1 + s^2 and 1. n = 2: the softmax of two scores is logistic in sqrt(2) s g."""
    s = np.array([150.0, 1e4])
    f1, f2, _, _ = _frozen(s, np.array([1, 2]))
    np.testing.assert_allclose(f1[:, 0], 1 + s**2, rtol=1e-10)
    np.testing.assert_allclose(f2[:, 0], 1.0, rtol=1e-10)
    for i, size in enumerate(s):
        scale = math.sqrt(2.0) * size
        across = integrate.quad(
            lambda x, c=scale: stats.norm.pdf(x / c) / c / (2 * math.cosh(x / 2) ** 2), -80, 80
        )[0]
        assert f2[i, 1] == pytest.approx(1 - across, rel=1e-8)


def test_drawn_queries_tell_their_error() -> None:
    """Ten seeds of 24 queries of a mixture spread as much as the standard error says, within a
    factor of two.
    """
    law = es.Mixture([0.7, 0.3], [es.Gaussian([[1.0]]), es.Gaussian([[0.2]], [1.0])])
    curves = [
        es.exact_curve(es.Head([[0.5]], [[1.0]]), law, law, [100], seed=seed, draws=24)
        for seed in range(10)
    ]
    spread = np.std([curve.rms[0] for curve in curves], ddof=1)
    told = np.mean([curve.query_stderr[0] for curve in curves])
    assert 0.5 < spread / told < 2.0
    assert "24 queries drawn" in curves[0].origin


def test_a_law_of_queries_must_fit() -> None:
    law = es.Gaussian(eye(2))
    head = es.Head(eye(2), eye(2))
    with pytest.raises(ValueError, match="expected a law of dimension 2"):
        es.exact_curve(head, law, es.Sphere(3), [10])
    with pytest.raises(ValueError, match="details: expected queries as rows"):
        es.exact_curve(head, law, law, [10], details=True)
