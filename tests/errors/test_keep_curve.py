"""exact_pool_curve(keep=...): against the sampling it generalises, against brute force, and what it
refuses.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.special
import torch
from torch import Tensor

import esscher as es
import esscher.keep as keep
from esscher.errors.doubling import inclusion_error
from esscher.errors.keep_curve import KeepErrors
from esscher.keep.context import Context
from tests.keep.table import Given

KEYS = 40


def tensors(seed: int = 0, keys: int = KEYS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(rows, 8, generator=generator, dtype=torch.float64) for rows in (6, keys, keys)
    )
    return 2 * q, k, v[:, :5]


def test_random_keys_are_the_bernoulli_sampling() -> None:
    n = [1, 7, 20, KEYS]
    known = es.exact_pool_curve(*tensors(), n, "bernoulli", details=True)
    found = es.exact_pool_curve(*tensors(), n, keep="random", details=True)
    assert known.queries is not None
    assert found.queries is not None
    np.testing.assert_allclose(found.queries.mse[:, :-1], known.queries.mse[:, :-1], rtol=1e-12)
    np.testing.assert_allclose(found.rms[-1], 0, atol=1e-14)
    np.testing.assert_allclose(found.effective_tokens, known.effective_tokens, rtol=1e-12)
    assert found.kept == pytest.approx(n)


@pytest.mark.parametrize(
    "rule",
    ["sinks:2+recent:5+random:0.3:reweight", "topk:4+random:0.2:reweight", "neyman:12", "window:3"],
)
def test_a_rule_against_drawn_subsets(rule: str) -> None:
    """20,000 subsets: the mean squared error of each query within 5 of its standard errors; 4e-6
    for 6 queries.
    """
    q, k, v = tensors()
    positions = [KEYS - 1, KEYS - 1, 30, 25, 20, 15]
    curve = es.exact_pool_curve(q, k, v, keep=rule, positions=positions)
    context = es.keep.Context.of(q, k, v, positions=positions)
    kept = es.keep.parse(rule).include(context)
    weight = torch.ones_like(kept.probability) if kept.weight is None else kept.weight
    generator = torch.Generator().manual_seed(5)
    squares = []
    for _ in range(100):
        chosen = (
            torch.rand(200, 6, KEYS, generator=generator, dtype=torch.float64) < kept.probability
        )
        logits = (context.scores + weight.log()).masked_fill(~chosen, -torch.inf)
        error = torch.softmax(logits, 2) @ v - context.limit
        squares.append(torch.where(chosen.any(2), error.square().sum(2), 0.0))
    drawn = torch.cat(squares)
    stderr = drawn.std(0) / len(drawn) ** 0.5
    assert curve.queries is not None
    assert bool(
        (
            (drawn.mean(0) - torch.from_numpy(curve.queries.mse[:, 0])).abs() <= 5 * stderr + 1e-14
        ).all()
    )
    assert curve.kept == pytest.approx(float(kept.size.mean()))


RULES = (
    *(
        "random:0.02",
        "random:0.5",
        "random:0.99",
        "random:0.3:reweight",
        "sinks:4+recent:64+random:0.1:reweight",
    ),
    *(
        "topk:16+random:0.05:reweight",
        "topk:16+random:0.3",
        "topk:300+random:0.9:reweight",
        "strided:7+random:0.2",
    ),
)


@pytest.mark.parametrize("rule", RULES)
def test_compiled_sums_give_what_the_float64_integral_gives(rule: str) -> None:
    """Queries at several places, one of them so sharp that one key has nearly all its weight."""
    q, k, v = (x.float() for x in tensors(3, 3000))
    q[0] *= 12
    context = es.keep.Context.of(q, k, v + 100, positions=[2999, 2999, 2500, 2000, 1500, 1000])
    kept = es.keep.parse(rule).include(context)
    by_keys = inclusion_error(context.scores, context.v, kept.probability, kept.weight)
    curve = KeepErrors(context).curve(es.keep.parse(rule), details=True)
    assert curve.queries is not None
    assert curve.queries.bias is not None
    rms = np.sqrt(by_keys.mse)
    np.testing.assert_allclose(np.sqrt(curve.queries.mse), rms, rtol=1e-4, atol=1e-12)
    np.testing.assert_allclose(curve.queries.sum_p2, by_keys.sum_p2, rtol=1e-4)
    np.testing.assert_allclose(curve.queries.bias, by_keys.bias, atol=1e-3 * rms.max())


def test_a_rule_with_all_its_numbers_has_one_point() -> None:
    curve = es.exact_pool_curve(*tensors(), keep=es.keep.Sinks(2) | es.keep.Recent(6))
    assert curve.n.tolist() == [8]
    assert curve.kept == pytest.approx([8])
    assert curve.slope is None
    assert "sinks:2+recent:6" in curve.origin


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"keep": "topk", "sampling": "bernoulli", "n": 3},
            "leave sampling out",
        ),
        ({"positions": [1] * 6, "n": 3}, "give keep too, or leave positions out"),
        ({}, "only a keep rule with all its numbers goes without"),
        ({"keep": "topk", "n": 41}, "expected 1 to 40 keys, got 41"),
        ({"keep": "topk"}, "topk has no number of its own"),
        (
            {"keep": "topk", "n": 3, "positions": [1, 2]},
            "expected 6 whole numbers from 0 to 39, one for each query",
        ),
        (
            {"keep": "topk", "n": 3, "positions": [KEYS] * 6},
            "expected 6 whole numbers from 0 to 39",
        ),
        ({"keep": 3, "n": 3}, "expected a rule such as sinks:4"),
    ],
)
def test_refusals(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        es.exact_pool_curve(*tensors(), **given)  # type: ignore[arg-type]


def test_given_probabilities_have_a_curve() -> None:
    q, k, v = tensors()
    curve = es.exact_pool_curve(q, k, v, keep=Given(torch.full((KEYS,), 0.5)))
    assert "given" in curve.origin
    np.testing.assert_allclose(
        curve.rms, es.exact_pool_curve(q, k, v, keep="random:0.5:reweight").rms, rtol=1e-12
    )


def wide_pool(queries: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Scores up to 1000 nats apart, the extremes in the middle: what the first and the last keys
    weigh underflows in float64 or in float32 alone.
    """
    generator = torch.Generator().manual_seed(0)
    score = torch.tensor([300.0, 121.0, 1000.0, 0.5, 0.0, 800.0, 120.0, 90.0])
    k = score[:, None].to(dtype)
    v = torch.randn(8, 3, generator=generator, dtype=torch.float64).to(dtype)
    # both ends of the scores may be the heavy one
    q = torch.where(torch.arange(queries) % 2 == 0, 1.0, -1.0)[:, None].to(dtype)
    return q, k, v


def explicit_mse(score: np.ndarray, v: np.ndarray, p: np.ndarray, w: np.ndarray) -> float:
    """Of one query: every subset of the keys that chance decides, each a softmax of its own in the
    logarithms; no kept key counts as no error.
    """
    everything = scipy.special.softmax(score) @ v
    sure, free = np.flatnonzero(p == 1), np.flatnonzero((p > 0) & (p < 1))
    total = 0.0
    for taken in itertools.product([False, True], repeat=len(free)):
        chosen = np.array(taken, dtype=bool)
        kept = np.concatenate([sure, free[chosen]])
        if len(kept) == 0:
            continue
        out = scipy.special.softmax(score[kept] + np.log(w[kept])) @ v[kept]
        chance = np.prod(np.where(chosen, p[free], 1 - p[free]))
        total += float(chance * ((out - everything) ** 2).sum())
    return total


@pytest.mark.parametrize("queries", [2, 600], ids=["few pairs", "many pairs"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(
    "text",
    [
        *("topk", "recent", "heavy", "keynorm", "expected", "impact", "sinks:1+recent"),
        *("strided:8+topk", "topk:1+heavy", "sinks:1+keynorm", "recent:2", "sinks:2+topk:1"),
        *("random", "sinks:1+random", "recent:2+random", "recent:2+random:reweight"),
        *("topk:1+random", "sinks:1+neyman", "neyman"),
    ],
)
def test_wide_scores_for_every_rule(text: str, dtype: torch.dtype, queries: int) -> None:
    """Kept keys far below the largest score count as they do alone: every subset by itself."""
    q, k, v = wide_pool(queries, dtype)
    rule = keep.parse(text)
    context = Context.of(q, k, v, 1.0)
    counts = [2, 3, 5] if rule.free is not None else None
    found = es.exact_pool_curve(q, k, v, counts, scale=1.0, keep=text)
    assert found.queries is not None
    for i, n in enumerate(counts or [None]):
        kept = rule.include(context, n)
        p = kept.probability.numpy()
        w = np.ones_like(p) if kept.weight is None else kept.weight.numpy()
        for row in range(2):
            score = context.scores[row].numpy()
            expected = explicit_mse(score, v.double().numpy(), p[row], w[row])
            within = 1e-9 if dtype == torch.float64 else 3e-4
            assert found.queries.mse[row, i] == pytest.approx(expected, rel=within, abs=1e-20)
