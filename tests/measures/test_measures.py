"""What is particular to one law."""

from __future__ import annotations

import pytest
import torch

import esscher as es
from esscher.measures.fields import read_law

EYE = torch.eye(3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("cov", "word"),
    [
        ([[1.0, 0.5], [0.4, 1.0]], "symmetric"),
        ([[1.0, 2.0], [2.0, 1.0]], "positive semi-definite"),
        ([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], "square"),
        ([[1.0, float("nan")], [0.0, 1.0]], "finite"),
        ([1.0, 1.0], "2 axes"),
        (torch.eye(2, dtype=torch.int64), "floating"),
    ],
)
def test_bad_covariance(cov: object, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        es.Gaussian(cov)


def test_gaussian_from_a_sample_covariance_in_float32() -> None:
    """Rounding makes the smallest eigenvalues of a singular float32 covariance negative; that is
    not an error.
    """
    tokens = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    measure = es.Gaussian(torch.cov(tokens.T))
    assert measure.mean.dtype == measure.sample(3, torch.Generator()).dtype == torch.float32
    assert bool(torch.isfinite(measure.sample(100, torch.Generator().manual_seed(1))).all())


@pytest.mark.parametrize(
    "make",
    [
        lambda: es.Gaussian(EYE, [1.0, 2.0]),
        lambda: es.Mixture([1.0], []),
        lambda: es.Mixture([0.5, 0.5], [es.Sphere(2), es.Sphere(3)]),
        lambda: es.Mixture([0.5], [es.Sphere(2), es.Sphere(2)]),
        lambda: es.Mixture([-0.5, 1.5], [es.Sphere(2), es.Sphere(2)]),
        lambda: es.Mixture([0.0, 0.0], [es.Sphere(2), es.Sphere(2)]),
        lambda: es.Pool(torch.zeros(0, 3)),
        lambda: es.Pool(torch.zeros(3, 0)),
        lambda: es.Pool(torch.zeros(3)),
        lambda: es.Mixture([0.0, 0.0], [es.Sphere(3), es.Sphere(3)]),
        lambda: es.Mixture([1.0], [es.Sphere(3), es.Sphere(3)]),
        lambda: es.Pool(torch.tensor([[float("inf")]])),
        lambda: es.Sphere(0),
        lambda: es.Sphere(2.5),
        lambda: es.Sphere(3, 0.0),
        lambda: es.Sphere(3, -1.0),
        lambda: es.Ball(3, float("nan")),
        lambda: es.Cube(3, 0.0),
        lambda: es.Rademacher(3, -2.0),
        lambda: es.Laplace(3, "wide"),
    ],
)
def test_bad_laws_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        make()  # type: ignore[operator]


def test_laplace_says_where_its_limit_exists() -> None:
    measure = es.Laplace(2, 0.5)
    assert torch.isfinite(measure.log_laplace([1.999, -1.999]))
    with pytest.raises(ValueError, match="at 1 of 1 tilts: Laplace has no limit there"):
        measure.tilted_mean([0.0, 2.0])
    with pytest.raises(ValueError, match="Laplace has no limit there"):
        es.Mixture([0.5, 0.5], [es.Sphere(2), measure]).log_laplace([3.0, 0.0])


def test_pool_of_one_token_is_a_point() -> None:
    pool = es.Pool(torch.tensor([[2.0, -1.0, 0.5]]))
    torch.testing.assert_close(
        pool.tilted_mean(EYE), torch.tensor([2.0, -1.0, 0.5]).double().expand(3, 3)
    )
    assert float(pool.tilted_cov(EYE).abs().max()) == 0.0


def test_pool_tilted_mean_is_softmax_attention_for_any_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = 3 * torch.randn(
        101, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    theta = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = (theta @ tokens.T).softmax(-1) @ tokens
    torch.testing.assert_close(es.Pool(tokens).tilted_mean(theta), expected, rtol=1e-13, atol=1e-13)
    monkeypatch.setattr("esscher.measures.pool.BLOCK", 7 * 13)
    torch.testing.assert_close(es.Pool(tokens).tilted_mean(theta), expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(
        es.Pool(tokens).log_laplace(1e4 * theta),
        1e4 * (theta @ tokens.T).max(1).values - torch.log(torch.tensor(101.0).double()),
    )


def test_components_of_weight_zero_do_not_count() -> None:
    one, other, none = (es.Pool([[x]]) for x in (1.0, 2.0, 5.0))
    weighted, smaller = es.Mixture([1, 3, 0], [one, other, none]), es.Mixture([1, 3], [one, other])
    theta = torch.tensor([[0.7], [-2.0]], dtype=torch.float64)
    torch.testing.assert_close(weighted.tilted_mean(theta), smaller.tilted_mean(theta))
    assert 5.0 not in weighted.sample(1000, torch.Generator().manual_seed(0))


def test_known_special_cases() -> None:
    """Circle of one dimension is Rademacher; the ball on a line is the cube; a mixture of one law
    is that law.
    """
    theta = torch.linspace(-3, 3, 13, dtype=torch.float64)[:, None]
    for same, other in (
        (es.Sphere(1, 1.7), es.Rademacher(1, 1.7)),
        (es.Ball(1, 0.4), es.Cube(1, 0.4)),
        (es.Mixture([2.0], [es.Cube(1)]), es.Cube(1)),
    ):
        torch.testing.assert_close(
            same.log_laplace(theta), other.log_laplace(theta), rtol=1e-12, atol=1e-14
        )
        torch.testing.assert_close(
            same.tilted_mean(theta), other.tilted_mean(theta), rtol=1e-12, atol=1e-14
        )
        torch.testing.assert_close(
            same.tilted_cov(theta), other.tilted_cov(theta), rtol=1e-10, atol=1e-14
        )


def test_reach() -> None:
    assert es.Gaussian(torch.diag(torch.tensor([4.0, 9.0]))).reach == pytest.approx(9.0)
    assert es.Sphere(4, 3.0).reach == pytest.approx(9 / 4)
    assert es.Laplace(2, 0.5).reach == pytest.approx(0.5)


@pytest.mark.parametrize("mean", [0.1, [0.1, 0.1]])
def test_a_mean_from_a_file_keeps_its_digits(mean: float | list[float]) -> None:
    law = read_law({"law": "gaussian", "dim": 2, "mean": mean}).build(torch.float64, "cpu")
    assert law.mean.tolist() == [0.1, 0.1]
