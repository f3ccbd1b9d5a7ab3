"""Streaming moments: one pass equals any split in any order, large offsets cost no digits, verdicts
on known laws.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from esscher.tails import moments


def summarise(rows: torch.Tensor) -> moments.TokenSummary:
    return moments.finish(moments.update(moments.init(rows.shape[1]), rows))


def rows_of(law: str, n: int = 20_000, d: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    normal = torch.randn(n, d, dtype=torch.float64, generator=generator)
    if law == "normal":
        return normal
    if law == "uniform":
        return torch.rand(n, d, dtype=torch.float64, generator=generator)
    assert law == "student"
    chi = torch.randn(n, d, 5, dtype=torch.float64, generator=generator).square().sum(-1) / 5
    return normal / chi.sqrt()


def stream(rows: Tensor, cuts: list[int], *, higher: bool = True) -> moments.TokenMoments:
    parts = torch.tensor_split(rows, cuts, dim=-2)
    return functools.reduce(
        moments.update, parts, moments.init(rows.shape[-1], tuple(rows.shape[:-2]), higher=higher)
    )


def test_equals_scipy() -> None:
    rows = rows_of("student") @ torch.randn(
        7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    summary = moments.finish(stream(rows, [1, 2, 500, 7001]))
    array = rows.numpy()
    assert summary.count == len(array)
    assert summary.kurtosis is not None
    assert summary.largest_z is not None
    np.testing.assert_allclose(summary.mean, array.mean(0), atol=1e-14)
    np.testing.assert_allclose(summary.cov, np.cov(array.T, bias=True), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(
        summary.kurtosis, scipy.stats.kurtosis(array, fisher=False), rtol=1e-12
    )
    z = np.abs(array - array.mean(0)) / array.std(0)
    assert float(summary.largest_z) == pytest.approx(z.max(), rel=1e-12)


@pytest.mark.parametrize("higher", [True, False])
def test_splits_and_orders_agree(higher: bool) -> None:
    rows = 5 + rows_of("student", 3001)
    whole = stream(rows, [], higher=higher)
    parts = [
        stream(part, [], higher=higher) for part in torch.tensor_split(rows, [3, 700, 701, 2000])
    ]
    order = [4, 0, 3, 1, 2]
    merged = functools.reduce(moments.merge, (parts[i] for i in order))
    pairs = moments.merge(
        moments.merge(parts[0], parts[1]),
        moments.merge(parts[2], moments.merge(parts[3], parts[4])),
    )
    for other in (merged, pairs, stream(rows.flip(0), [17, 1999], higher=higher)):
        assert other.count == whole.count
        torch.testing.assert_close(other.mean, whole.mean, rtol=1e-13, atol=0)
        torch.testing.assert_close(other.scatter, whole.scatter, rtol=1e-11, atol=1e-9)
        if whole.higher is None or other.higher is None:
            assert whole.higher is None
            assert other.higher is None
            continue
        torch.testing.assert_close(other.higher.third, whole.higher.third, rtol=1e-9, atol=1e-8)
        torch.testing.assert_close(other.higher.fourth, whole.higher.fourth, rtol=1e-11, atol=0)
        assert torch.equal(other.higher.low, whole.higher.low)


def test_a_large_offset_costs_no_digits() -> None:
    """1e8 with deviation 1 leaves eight digits of each row; sums of squares would lose all of
    them.
    """
    rows = rows_of("normal", 4096)
    far = rows + 1e8
    # the subtraction is exact: the rows as they were rounded
    exact = moments.finish(stream(far - 1e8, []))
    summary = moments.finish(stream(far, [1000, 1001, 3000]))
    assert summary.kurtosis is not None
    assert exact.kurtosis is not None
    torch.testing.assert_close(summary.cov, exact.cov, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(summary.kurtosis, exact.kurtosis, rtol=1e-7, atol=0)


def test_heads_are_separate() -> None:
    heads = torch.stack([rows_of("normal", 501, 3), 2 + rows_of("uniform", 501, 3)])
    state = moments.update(
        moments.update(moments.init(3, (2,)), heads[:, :200].float()), heads[:, 200:].float()
    )
    together = moments.finish(state)
    for h in range(2):
        alone = summarise(heads[h].float())
        torch.testing.assert_close(together.cov[h], alone.cov, rtol=1e-12, atol=1e-14)
        assert together.kurtosis is not None
        assert alone.kurtosis is not None
        torch.testing.assert_close(together.kurtosis[h], alone.kurtosis, rtol=1e-10, atol=0)


def test_gaussian_largest_is_the_median_of_the_maximum() -> None:
    """3000 maxima of 1000: the share below the median is 1/2 within 4 standard errors (false alarms
    6e-5).
    """
    z = np.abs(np.random.default_rng(4).standard_normal((3000, 1000))).max(axis=1)
    assert abs((z < moments.gaussian_largest(1000)).mean() - 0.5) < 4 * 0.5 / math.sqrt(3000)
    assert moments.gaussian_largest(10**9) == pytest.approx(6.2, abs=0.3)
    assert moments.gaussian_largest(10**15) > moments.gaussian_largest(10**9)


@pytest.mark.parametrize(
    ("law", "verdict"), [("normal", "sub-Gaussian"), ("uniform", "lighter"), ("student", "heavier")]
)
def test_verdicts(law: str, verdict: str) -> None:
    summary = summarise(rows_of(law))
    assert summary.verdict == verdict
    assert "standard deviations" in summary.reason


def test_one_outlier_is_noticed() -> None:
    rows = rows_of("normal", 20_000, 40)
    rows[17, 3] = 9.0
    assert summarise(rows).verdict == "heavier"


def test_constant_coordinates_have_no_shape() -> None:
    rows = torch.cat(
        [rows_of("normal", 100, 2), torch.full((100, 1), 1 / 3, dtype=torch.float64)], dim=1
    )
    summary = summarise(rows)
    assert summary.kurtosis is not None
    assert summary.largest_z is not None
    assert summary.kurtosis.isnan().tolist() == [False, False, True]
    assert float(summary.largest_z) < 5
    assert summarise(torch.ones(9, 2)).verdict == "unknown"


def test_refusals() -> None:
    with pytest.raises(ValueError, match="seen no row"):
        moments.finish(moments.init(3))
    with pytest.raises(ValueError, match="length 3"):
        moments.update(moments.init(3), torch.zeros(5, 2))
    with pytest.raises(ValueError, match="heads"):
        moments.update(moments.init(3, (2,)), torch.zeros(4, 5, 3))
    with pytest.raises(ValueError, match="finite"):
        moments.update(moments.init(1), [[math.nan]])
    assert moments.update(moments.init(3), torch.zeros(0, 3)).count == 0
    assert moments.finish(stream(rows_of("normal", 50), [], higher=False)).verdict == "unknown"
