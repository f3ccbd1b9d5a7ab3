"""Errors of two heads on one random set of keys, against all subsets and against the integral of
one head.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from esscher.errors.doubling import inclusion_error
from esscher.errors.integral import pair_error

N, WIDTH = 7, 3


def heads(
    spread: float, seed: int = 0
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Scores, values and softmax weights of two heads."""
    g = torch.Generator().manual_seed(seed)
    scores = [spread * torch.randn(N, generator=g, dtype=torch.float64) for _ in range(2)]
    values = [torch.randn(N, WIDTH, generator=g, dtype=torch.float64) for _ in range(2)]
    return scores, values, [one.softmax(0) for one in scores]


def by_enumeration(scores, values, p: torch.Tensor, w: torch.Tensor) -> float:  # type: ignore[no-untyped-def]
    """Mean of <e_1, e_2> over all subsets of keys."""
    total = 0.0
    limits = [one.softmax(0) @ value for one, value in zip(scores, values, strict=True)]
    for kept in itertools.product([False, True], repeat=N):
        keep = torch.tensor(kept)
        chance = float(torch.where(keep, p, 1 - p).prod())
        if keep.any() and chance > 0:
            errors = []
            for one, value, limit in zip(scores, values, limits, strict=True):
                e = torch.where(keep, w * one.exp(), 0.0)
                errors.append(e @ value / e.sum() - limit)
            total += chance * float(errors[0] @ errors[1])
    return total


@pytest.mark.parametrize("sure", [0, 2])
@pytest.mark.parametrize("reweight", [False, True])
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_against_all_subsets(sure: int, reweight: bool, spread: float) -> None:
    scores, values, weights = heads(spread)
    p = torch.full((N,), 0.3, dtype=torch.float64)
    p[3], p[:sure] = 0.7, 1.0
    w = 1 / p if reweight else torch.ones_like(p)
    centred = [value - pi @ value for value, pi in zip(values, weights, strict=True)]
    found = pair_error((scores[0], scores[1]), (centred[0], centred[1]), p, w)
    assert found == pytest.approx(by_enumeration(scores, values, p, w), rel=1e-6, abs=1e-9)


def test_of_one_head_with_itself_it_is_the_mean_squared_error() -> None:
    scores, values, weights = heads(1.0)
    p = torch.tensor([1.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], dtype=torch.float64)
    centred = values[0] - weights[0] @ values[0]
    mse = float(inclusion_error(scores[0][None], values[0], p[None], None).mse[0, 0])
    assert pair_error((scores[0], scores[0]), (centred, centred), p) == pytest.approx(mse, rel=1e-6)


def test_first_order_is_the_limit_of_few_dropped_keys() -> None:
    """With p = 1 - x the error is that of single dropped keys, times x."""
    scores, values, weights = heads(0.5)
    centred = [value - pi @ value for value, pi in zip(values, weights, strict=True)]
    for x, tolerance in ((1e-2, 0.1), (1e-4, 1e-3)):
        p = torch.full((N,), 1 - x, dtype=torch.float64)
        exact = pair_error((scores[0], scores[1]), (centred[0], centred[1]), p, step=0.2)
        dropped = sum(  # pi / (1 - pi) where one key goes
            float(pi * rho / ((1 - pi) * (1 - rho)) * (a @ b))
            for pi, rho, a, b in zip(weights[0], weights[1], centred[0], centred[1], strict=True)
        )
        assert exact == pytest.approx(x * dropped, rel=tolerance)
