"""Student tokens: samples of the right law, and no transform away from 0."""

from __future__ import annotations

import math

import pytest
import scipy.stats
import torch

import esscher as es
from esscher.measures.rotational import Student


def test_coordinates_and_norms_have_their_laws(generator: torch.Generator) -> None:
    """Kolmogorov-Smirnov at level 0.001 for each of two: a coordinate is Student, |y|^2 / d is
    Fisher(d, df).
    """
    y = Student(3, df=2.5, scale=1.7).sample(20_000, generator).double() / 1.7
    assert y.shape == (20_000, 3)
    assert scipy.stats.kstest(y[:, 0].numpy(), scipy.stats.t(2.5).cdf).pvalue > 0.001
    assert (
        scipy.stats.kstest((y.square().sum(1) / 3).numpy(), scipy.stats.f(3, 2.5).cdf).pvalue
        > 0.001
    )


def test_samples_repeat_and_take_the_dtype() -> None:
    law = Student(2, 4, dtype=torch.float32)
    first, second = (law.sample(5, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert first.dtype == torch.float32


def test_moments_where_they_exist() -> None:
    law = Student(2, df=5, scale=3.0)
    assert torch.equal(law.mean, torch.zeros(2).double())
    assert torch.allclose(law.cov, 9.0 * 5.0 / 3.0 * torch.eye(2).double())
    assert law.reach == pytest.approx(15.0)
    assert float(law.log_laplace(torch.zeros(2).double())) == 0.0
    with pytest.raises(ValueError, match="df > 2, got df = 2"):
        _ = Student(2, df=2).cov
    assert torch.equal(Student(2, df=2).mean, torch.zeros(2).double())
    with pytest.raises(ValueError, match="df > 1, got df = 1"):
        _ = Student(2, df=1).mean


@pytest.mark.parametrize("name", ["log_laplace", "tilted_mean", "tilted_cov"])
def test_transform_is_refused_away_from_zero(name: str) -> None:
    theta = torch.zeros(3, 2).double()
    getattr(Student(2, 5), name)(theta)
    theta[1, 0] = 1e-9
    with pytest.raises(
        ValueError, match="Student has no limit there; its tails are too heavy at every scale"
    ):
        getattr(Student(2, 5), name)(theta)


def test_attention_is_refused_by_limit_and_exact_curve() -> None:
    law, eye = Student(2, 5), torch.eye(2).double()
    for refused in (
        lambda: es.limit(es.Head(eye, eye), law)(eye),
        lambda: es.exact_curve(es.Head(eye, eye), law, eye, [10]),
        lambda: es.hardmax_limit(es.Head(eye, eye), law)(eye),
    ):
        with pytest.raises(ValueError, match=r"no limit|unbounded support"):
            refused()


@pytest.mark.parametrize("field", ["df", "scale"])
@pytest.mark.parametrize("bad", [0, -1.0, math.inf, "x"])
def test_bad_numbers_are_named(field: str, bad: object) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        Student(2, **{"df": 3.0, "scale": 1.0, field: bad})
