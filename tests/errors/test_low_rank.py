"""LowRank: against drawn matrices; and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import esscher as es

KEYS = 30


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(rows, 4, generator=generator, dtype=torch.float64) for rows in (7, KEYS, KEYS)
    )
    return 2 * q, k, v[:, :3] + 0.5


def test_random_mixtures_against_drawn_matrices() -> None:
    """20,000 Gaussian matrices: each query within 4.5 standard errors; 5e-5 for 7 queries."""
    q, k, v = tensors()
    curve = es.exact_pool_curve(q, k, v, [2, 5], keep="lowrank")
    context = es.keep.Context.of(q, k, v)
    generator = torch.Generator().manual_seed(1)
    assert curve.queries is not None
    for j, rank in enumerate([2, 5]):
        matrices = (
            torch.randn(20_000, rank, KEYS, generator=generator, dtype=torch.float64) / rank**0.5
        )
        out = (context.attention @ matrices.mT) @ (matrices @ v)
        drawn = (out - context.limit).square().sum(2).numpy()
        stderr = drawn.std(0) / 20_000**0.5
        assert (np.abs(curve.queries.mse[:, j] - drawn.mean(0)) < 4.5 * stderr).all()
    assert curve.kind == "exact"
    assert curve.kept is not None
    assert curve.kept.tolist() == [2, 5]
    np.testing.assert_allclose(curve.rms[0] / curve.rms[1], (5 / 2) ** 0.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"keep": "lowrank", "n": [KEYS + 1]},
            "expected ranks of at most 30, the number of keys, got 31",
        ),
        ({"keep": "lowrank:31"}, "expected ranks of at most 30, the number of keys, got 31"),
        ({"keep": "lowrank"}, "lowrank expects n, the ranks"),
        ({"keep": "lowrank:3", "n": 3}, "lowrank:3 expects no n"),
        ({"keep": "lowrank:0"}, "lowrank: expected a whole number of at least 1, got 0"),
        ({"keep": "lowrank:3+sinks:2"}, "joins no other part"),
        (
            {"keep": "lowrank", "n": 3, "positions": [KEYS - 2] * 7},
            "expected queries that see every key",
        ),
    ],
)
def test_refusals(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        es.exact_pool_curve(*tensors(), **given)  # type: ignore[arg-type]


def test_it_is_no_keep_rule() -> None:
    with pytest.raises(ValueError, match="lowrank is for exact_pool_curve"):
        es.attend(*tensors(), keep="lowrank:3")
    assert es.keep.parse("lowrank:5") == es.keep.LowRank(5)
