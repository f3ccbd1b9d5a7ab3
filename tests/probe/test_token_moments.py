"""Streaming moments: one pass equals any split in any order, large offsets cost no digits."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from esscher.probe.statistic import TokenMoments


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


def stream(rows: Tensor, cuts: list[int]) -> TokenMoments:
    parts = torch.tensor_split(rows, cuts, dim=-2)
    return functools.reduce(TokenMoments.merge, map(TokenMoments.of, parts))


def test_equals_numpy() -> None:
    rows = rows_of("student") @ torch.randn(
        7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    state = stream(rows, [1, 2, 500, 7001])
    array = rows.numpy()
    assert state.count == len(array)
    np.testing.assert_allclose(state.mean, array.mean(0), atol=1e-14)
    np.testing.assert_allclose(state.cov, np.cov(array.T, bias=True), rtol=1e-12, atol=1e-12)


def test_splits_and_orders_agree() -> None:
    rows = 5 + rows_of("student", 3001)
    whole = stream(rows, [])
    parts = [stream(part, []) for part in torch.tensor_split(rows, [3, 700, 701, 2000])]
    order = [4, 0, 3, 1, 2]
    merged = functools.reduce(TokenMoments.merge, (parts[i] for i in order))
    pairs = TokenMoments.merge(
        TokenMoments.merge(parts[0], parts[1]),
        TokenMoments.merge(parts[2], TokenMoments.merge(parts[3], parts[4])),
    )
    for other in (merged, pairs, stream(rows.flip(0), [17, 1999])):
        assert other.count == whole.count
        torch.testing.assert_close(other.mean, whole.mean, rtol=1e-13, atol=0)
        torch.testing.assert_close(other.scatter, whole.scatter, rtol=1e-11, atol=1e-9)


def test_a_large_offset_costs_no_digits() -> None:
    """1e8 with deviation 1 leaves eight digits of each row; sums of squares would lose all of
    them.
    """
    rows = rows_of("normal", 4096)
    far = rows + 1e8
    # the subtraction is exact: the rows as they were rounded
    exact, found = stream(far - 1e8, []), stream(far, [1000, 1001, 3000])
    torch.testing.assert_close(found.cov, exact.cov, rtol=1e-7, atol=1e-7)


def test_heads_are_separate() -> None:
    heads = torch.stack([rows_of("normal", 501, 3), 2 + rows_of("uniform", 501, 3)])
    state = stream(heads.float(), [200])
    for h in range(2):
        alone = stream(heads[h].float(), [])
        torch.testing.assert_close(state.cov[h], alone.cov, rtol=1e-12, atol=1e-14)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="finite"):
        TokenMoments.of(torch.tensor([[math.nan]]))
    assert TokenMoments.of(torch.zeros(0, 3)).count == 0
