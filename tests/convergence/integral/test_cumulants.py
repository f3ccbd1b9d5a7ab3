"""The series of cumulants against sums key by key."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mpmath import mp, mpf, taylor

import esscher.keep as keep
from esscher.convergence.integral.cumulants import REACH, _coin, cumulant_errors
from esscher.convergence.integral.inclusion import InclusionErrors, inclusion_error
from esscher.convergence.keep_curve import keep_curve
from esscher.keep.context import Context


def context(sharpness: float, keys: int = 1024) -> Context:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(size, 24, generator=generator) for size in (8, keys, keys))
    return Context.of(sharpness * q, k, v + 20)


def both(seen: Context, kept: keep.Inclusion) -> tuple[InclusionErrors, torch.Tensor, InclusionErrors]:
    weight = None if kept.weight is None else kept.weight.float()
    inputs = (seen.attention, seen.near, seen.drift, seen.distance, kept.probability)
    answer = cumulant_errors(*(x.float() for x in inputs), weight)
    return answer.errors, answer.known, inclusion_error(seen.scores, seen.v, kept.probability, kept.weight)


@pytest.mark.parametrize("sharpness", [0.5, 2.0])
@pytest.mark.parametrize("text", ["neyman", "neyman:shared", "random", "random:reweight", "sinks:4+topk:20+random"])
@pytest.mark.parametrize("n", [40, 160, 640])
def test_what_is_answered_is_right(text: str, n: int, sharpness: float) -> None:
    seen = context(sharpness)
    found, known, exact = both(seen, keep.parse(text).include(seen, n))
    assert found.accuracy < 1e-4
    rms = exact.mse.sqrt()
    torch.testing.assert_close(found.mse.sqrt()[known], rms[known], rtol=found.accuracy, atol=0)
    torch.testing.assert_close(found.sum_p2[known], exact.sum_p2[known], rtol=1e-4, atol=0)
    assert bool(((found.bias - exact.bias).norm(dim=1) < 1e-4 * rms)[known].all())
    if n >= 160 and sharpness < 1:
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


def test_a_query_that_a_few_keys_decide_is_not_answered() -> None:
    seen = context(1.0)
    _, known, _ = both(seen, keep.parse("random").include(seen, 5))
    assert not bool(known.any())


@pytest.mark.parametrize("text", ["neyman", "neyman:shared", "magicpig:4:tables=20"])
def test_all_queries_are_answered_in_the_end(text: str) -> None:
    """By the series where it holds and key by key elsewhere, within the accuracy that float32 has."""
    seen, rule = context(3.0, 4096), keep.parse(text)
    for n in (20, 400) if rule.free else (None,):
        kept = rule.include(seen, n)
        exact = inclusion_error(seen.scores, seen.v, kept.probability, kept.weight)
        curve = keep_curve(seen, rule, n, details=True)
        assert curve.queries is not None
        assert curve.queries.bias is not None
        np.testing.assert_allclose(np.sqrt(curve.queries.mse[:, 0]), exact.mse.sqrt().numpy(), rtol=1e-4)
        np.testing.assert_allclose(curve.queries.bias[:, 0], exact.bias.numpy(), atol=1e-4 * float(exact.mse.sqrt().min()))


@pytest.mark.parametrize("p", [0.03, 0.5, 0.9])
def test_cumulants_of_a_coin(p: float) -> None:
    """Taylor coefficients of log(1 - p + p exp(s)), by mpmath."""
    terms = REACH[-1][0]
    with mp.workdps(40):
        expected = [
            c * mp.factorial(k) for k, c in enumerate(taylor(lambda s: mp.log(1 - mpf(p) + mpf(p) * mp.exp(s)), 0, terms))
        ]
    found = _coin(torch.tensor([p], dtype=torch.float64), terms)
    for k, factor in enumerate(found, start=2):
        assert float(factor) * p * (1 - p) == pytest.approx(float(expected[k]), rel=1e-10, abs=1e-14)
