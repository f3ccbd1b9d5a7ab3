"""The delta method: its covariance."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch

import esscher as es
from esscher.errors import exact as delta
from tests.measures.table import LAWS, Law


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_gaussian_closed_form() -> None:
    """C = exp(s^2) V (Sigma + Sigma theta theta^T Sigma) V^T."""
    cov = torch.diag(torch.tensor([0.5, 1.2, 0.1]).double())
    head = es.Head(0.7 * randn(3, 3), randn(2, 3, seed=1), randn(3, seed=2))
    x = randn(4, 3, seed=3)
    got = es.delta_covariance(head, es.Gaussian(cov, [1.0, 2.0, 3.0]), x)
    for i in range(4):
        theta = head.tilt(x[i])
        growth = math.exp(float(theta @ cov @ theta))
        expected = growth * head.V @ (cov + cov @ torch.outer(theta, theta) @ cov) @ head.V.T
        torch.testing.assert_close(got[i], expected)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_equals_its_definition_by_sampling(law: Law) -> None:
    """C = E[e^2 c c^T] / (E e)^2 with E by samples at a small tilt, 5 standard errors entry by
    entry.
    """
    measure = law.make()
    d = measure.dim
    head = es.Head(0.2 * law.tilt * torch.eye(d).double(), randn(2, d))
    x = torch.full((1, d), 0.8, dtype=torch.float64)
    tokens = measure.sample(300_000, torch.Generator().manual_seed(0)).double()
    theta = head.tilt(x)[0]
    weight = torch.exp(2 * (tokens @ theta - measure.log_laplace(theta)))
    c = head.values(tokens) - es.limit(head, measure)(x)
    products = weight[:, None, None] * c[:, :, None] * c[:, None, :]
    standard = products.std(0) / math.sqrt(len(tokens))
    got = es.delta_covariance(head, measure, x)[0]
    assert bool(((products.mean(0) - got).abs() <= 5 * standard + 1e-12).all())


def test_single_precision_input_is_not_rounded_again() -> None:
    """A mixture with a Laplace part, 2 theta up to a thousandth from the edge of its strip, against
    40 digits: 1e-12.

    K = log(sum_k pi_k exp K_k), C = exp(K(2 theta) - 2 K(theta)) (K''(2 theta) + (K'(2 theta) -
    K'(theta))^2) V^2.
    """
    scale, slope = 0.4151920974254608, 1.1
    law = es.Mixture([0.25, 0.75], [es.Laplace(1, scale), es.Gaussian([[0.5]], [0.25])])
    head = es.Head(torch.tensor([[slope]]), torch.tensor([[0.7]]))
    a, v = (mpmath.mpf(float(x)) for x in (head.A, head.V))
    with mpmath.workdps(40):
        b = mpmath.mpf(scale)

        def K(t: mpmath.mpf) -> mpmath.mpf:
            return mpmath.log(1 / (1 - (b * t) ** 2) / 4 + 3 * mpmath.exp(t / 4 + t * t / 4) / 4)

        for part in (0.3, 0.9, 0.999):
            x = torch.tensor([[part / (2 * scale * slope)]])
            theta = a * mpmath.mpf(float(x))
            shift = mpmath.diff(K, 2 * theta) - mpmath.diff(K, theta)
            truth = (
                mpmath.exp(K(2 * theta) - 2 * K(theta))
                * (mpmath.diff(K, 2 * theta, 2) + shift**2)
                * v**2
            )
            assert float(es.delta_covariance(head, law, x)) == pytest.approx(
                float(truth), rel=1e-12 / (1 - part)
            )
            assert es.exact_curve(head, law, x, [9]).delta == pytest.approx(
                float(truth), rel=1e-12 / (1 - part)
            )


def test_infinite_where_the_squared_weight_has_no_mean() -> None:
    head = es.Head([[1.0]], [[1.0]])
    assert math.isinf(float(es.delta_covariance(head, es.Laplace(1), [[0.7]])[0, 0, 0]))
    assert math.isfinite(float(es.delta_covariance(head, es.Laplace(1), [[0.4]])[0, 0, 0]))
    assert math.isinf(float(delta.delta_trace(head, es.Laplace(1), [[0.7]])[0]))
    with pytest.raises(ValueError, match="Laplace has no limit there"):
        es.delta_covariance(head, es.Laplace(1), [[1.2]])


def test_curve_reports_the_delta_constant() -> None:
    law, head = es.Sphere(3, 2.0), es.Head(torch.eye(3).double(), torch.eye(3).double())
    curve = es.exact_curve(head, law, randn(5, 3), [10**9])
    assert curve.delta is not None
    assert math.sqrt(curve.delta / 1e9) == pytest.approx(float(curve.rms[0]), rel=1e-6)
    assert np.isfinite(curve.delta)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_the_trace_needs_no_covariance(law: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one block and in a block a query."""
    measure = law.make()
    generator = torch.Generator().manual_seed(3)
    V = torch.randn(3, measure.dim, dtype=torch.float64, generator=generator)
    head = es.Head(0.1 * law.tilt * torch.eye(measure.dim, dtype=torch.float64), V)
    x = 0.3 * torch.randn(7, measure.dim, dtype=torch.float64, generator=generator)
    expected = es.delta_covariance(head, measure, x).diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(delta.delta_trace(head, measure, x), expected, rtol=1e-12, atol=0)
    monkeypatch.setattr(delta, "BLOCK", 1)
    torch.testing.assert_close(delta.delta_trace(head, measure, x), expected, rtol=1e-12, atol=0)


def test_the_delta_method_beyond_the_range_is_infinite_and_never_nan() -> None:
    """s = 40: exp(1600) overflows; a value map that is 0 in one coordinate has no error there, so 0
    and not 0 * inf.
    """
    head = es.Head(torch.eye(2).double(), torch.tensor([[1.0, 0.0], [0.0, 0.0]]).double())
    law = es.Gaussian(torch.eye(2).double())
    found = es.delta_covariance(head, law, torch.tensor([[40.0, 0.0]]).double())[0]
    assert found[0, 0] == torch.inf
    assert (found.flatten()[1:] == 0).all()
    blind = es.Head(torch.eye(2).double(), torch.zeros(1, 2).double())
    assert es.exact_curve(blind, law, [[40.0, 0.0]], [10]).delta == 0
