"""Compiled sums at doubling nodes, against enumeration and against the float64 integral key
by key.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import esscher.keep as keep
from esscher.errors.doubling import doubling_errors
from esscher.errors.inclusion import InclusionErrors, inclusion_error
from esscher.errors.keep_curve import keep_curve
from esscher.keep.context import Context


def context(sharpness: float, keys: int = 1024) -> Context:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(size, 24, generator=generator) for size in (8, keys, keys))
    return Context.of(sharpness * q, k, v + 20)


def both(
    seen: Context, kept: keep.Inclusion
) -> tuple[InclusionErrors, torch.Tensor, InclusionErrors]:
    answer = doubling_errors(
        seen.attention, seen.near, seen.drift, seen.distance, kept.probability, kept.weight
    )
    return (
        answer.errors,
        answer.known,
        inclusion_error(seen.scores, seen.v, kept.probability, kept.weight),
    )


def of_subsets(seen: Context, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean squared error, bias and E sum p^2 over all subsets of the keys: (m,), (m, d), (m,)."""
    keys = p.shape[1]
    kept = torch.tensor(list(itertools.product([False, True], repeat=keys)))
    chance = torch.where(kept, p[:, None], 1 - p[:, None]).prod(2)  # (m, 2^keys)
    weights = torch.where(kept, seen.scores[:, None], -torch.inf).softmax(2).nan_to_num(0.0)
    error = (weights @ seen.v.double() - (seen.attention @ seen.v.double())[:, None]) * kept.any(1)[
        :, None
    ]
    squares = (chance * error.square().sum(2)).sum(1)
    return squares, (chance[:, :, None] * error).sum(1), (chance * weights.square().sum(2)).sum(1)


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 4.0])
def test_all_subsets_of_few_keys(sharpness: float) -> None:
    """The phase of the nodes against the sums of weights differs from query to query: the stated
    accuracy holds for all.
    """
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(size, 5, generator=generator) for size in (40, 9, 9))
    seen = Context.of(sharpness * q, k, v)
    p = torch.rand(40, 9, generator=generator, dtype=torch.float64)
    p[:, 0], p[:20, 1] = 1, 0
    p[10:, 0] = 0.7
    answer = doubling_errors(seen.attention, seen.near, seen.drift, seen.distance, p, None)
    mse, bias, sum_p2 = of_subsets(seen, p)
    assert bool(answer.known.all())
    torch.testing.assert_close(
        answer.errors.mse.sqrt(), mse.sqrt(), rtol=answer.errors.accuracy, atol=0
    )
    torch.testing.assert_close(
        answer.errors.sum_p2, sum_p2, rtol=2 * answer.errors.accuracy, atol=0
    )
    assert bool(((answer.errors.bias - bias).norm(dim=1) < 5e-5 * mse.sqrt()).all())


@pytest.mark.parametrize("sharpness", [0.5, 2.0])
@pytest.mark.parametrize(
    "text", ["neyman", "neyman:shared", "random", "random:reweight", "sinks:4+topk:20+random"]
)
@pytest.mark.parametrize("n", [40, 160, 640])
def test_what_is_answered_is_right(text: str, n: int, sharpness: float) -> None:
    seen = context(sharpness)
    found, known, exact = both(seen, keep.parse(text).include(seen, n))
    assert found.accuracy < 1e-4
    rms = exact.mse.sqrt()
    torch.testing.assert_close(found.mse.sqrt()[known], rms[known], rtol=found.accuracy, atol=0)
    torch.testing.assert_close(found.sum_p2[known], exact.sum_p2[known], rtol=1e-4, atol=0)
    assert bool(((found.bias - exact.bias).norm(dim=1) < 1e-4 * rms)[known].all())
    assert bool(known.all())


def test_given_probabilities_some_of_them_zero() -> None:
    seen = context(1.0)
    p = torch.rand(1024, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    p[:100], p[100:130] = 0, 1
    for reweight in (True, False):
        found, known, exact = both(seen, keep.Importance(p, reweight=reweight).include(seen))
        assert bool(known.all())
        torch.testing.assert_close(found.mse.sqrt(), exact.mse.sqrt(), rtol=5e-5, atol=0)
        torch.testing.assert_close(found.bias, exact.bias, rtol=0, atol=1e-5)


def test_weights_that_are_not_those_of_the_chances() -> None:
    seen = context(1.0)
    generator = torch.Generator().manual_seed(3)
    p, weight = (torch.rand(8, 1024, generator=generator, dtype=torch.float64) for _ in range(2))
    found, known, exact = both(seen, keep.Inclusion(p, weight + 0.5))
    assert bool(known.all())
    torch.testing.assert_close(found.mse.sqrt(), exact.mse.sqrt(), rtol=5e-5, atol=0)
    torch.testing.assert_close(found.bias, exact.bias, rtol=0, atol=1e-5)


def test_a_query_that_a_few_keys_decide() -> None:
    found, known, exact = both(seen := context(3.0), keep.parse("random").include(seen, 5))
    assert bool(known.all())
    torch.testing.assert_close(found.mse.sqrt(), exact.mse.sqrt(), rtol=found.accuracy, atol=0)


def test_where_nothing_but_the_average_is_kept_the_nodes_have_no_aliasing() -> None:
    found, known, exact = both(seen := context(0.1, 8192), keep.parse("random").include(seen, 4096))
    assert bool(known.all())
    torch.testing.assert_close(found.mse, exact.mse, rtol=5e-6, atol=0)  # the bound is 9e-5


def test_weights_so_far_apart_that_nodes_do_not_reach_are_not_answered_here_but_in_the_end() -> (
    None
):
    """Of a query the largest key is dropped with probability 1/2, and the others are exp(-90) of
    it.
    """
    generator = torch.Generator().manual_seed(5)
    k, v = torch.zeros(5000, 3), torch.randn(5000, 3, generator=generator)
    k[0, 0] = 1.0
    seen = Context.of(torch.tensor([[90.0, 0, 0], [1.0, 0, 0]]), k, v, scale=1.0)
    p = torch.full((5000,), 0.5, dtype=torch.float64)
    p[1] = 0.4
    kept = keep.Importance(p, reweight=False).include(seen)
    _, known, exact = both(seen, kept)
    assert known.tolist() == [False, True]
    curve = keep_curve(seen, keep.Importance(p, reweight=False))
    assert curve.queries is not None
    np.testing.assert_allclose(
        np.sqrt(curve.queries.mse[:, 0]), exact.mse.sqrt().numpy(), rtol=1e-4
    )


@pytest.mark.parametrize("text", ["neyman", "neyman:shared", "magicpig:4:tables=20"])
def test_all_queries_are_answered_in_the_end(text: str) -> None:
    """Within the accuracy that float32 has."""
    seen, rule = context(3.0, 4096), keep.parse(text)
    for n in (20, 400) if rule.free else (None,):
        kept = rule.include(seen, n)
        exact = inclusion_error(seen.scores, seen.v, kept.probability, kept.weight)
        curve = keep_curve(seen, rule, n, details=True)
        assert curve.queries is not None
        assert curve.queries.bias is not None
        np.testing.assert_allclose(
            np.sqrt(curve.queries.mse[:, 0]), exact.mse.sqrt().numpy(), rtol=1e-4
        )
        np.testing.assert_allclose(
            curve.queries.bias[:, 0], exact.bias.numpy(), atol=1e-4 * float(exact.mse.sqrt().min())
        )
