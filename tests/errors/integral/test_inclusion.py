"""inclusion_error against the enumeration of all subsets, and against the integral for one
probability.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import esscher.keep as keep
from esscher.errors.doubling import inclusion_error
from esscher.errors.integral import error_from_nodes
from tests.keep.table import RULES, Given
from tests.keep.test_rules import KEYS, PLACES, context


def by_enumeration(
    scores: Tensor, values: Tensor, p: Tensor, w: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean squared error, bias and E sum p^2 as sums over all subsets of the keys; no key kept: no
    error.
    """
    near = values - values[0]
    limit = torch.softmax(scores, 1) @ near
    e = torch.exp(scores - scores.amax(1, keepdim=True)) * (1.0 if w is None else w)
    # (subsets, 1, keys)
    kept = torch.tensor(list(itertools.product([False, True], repeat=scores.shape[1])))[:, None]
    chance = torch.where(kept, p, 1 - p).prod(2)
    total = torch.where(kept, e, 0.0).sum(2, keepdim=True)
    share = torch.where(kept, e, 0.0) / torch.where(total > 0, total, 1.0)
    error = torch.where(total > 0, share @ near - limit, 0.0)
    mse = (chance * error.square().sum(2)).sum(0)
    return mse, (chance[:, :, None] * error).sum(0), (chance * share.square().sum(2)).sum(0)


def check(scores: Tensor, values: Tensor, p: Tensor, w: Tensor | None = None) -> None:
    found = inclusion_error(scores, values, p, w)
    mse, bias, sum_p2 = by_enumeration(scores, values, p, w)
    # an error far below it has the rounding of the values in it
    size = float((values - values[0]).norm(dim=1).max())
    rms = np.sqrt(found.mse[:, 0])
    np.testing.assert_allclose(rms, mse.sqrt(), rtol=1e-11, atol=1e-14 * size)
    np.testing.assert_allclose(found.bias[:, 0], bias, rtol=1e-9, atol=1e-12 * size)
    np.testing.assert_allclose(found.sum_p2[:, 0], sum_p2, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize(("text", "is_open"), RULES)
def test_every_rule_equals_the_sum_over_all_subsets(
    text: str, is_open: bool, places: list[int] | None
) -> None:
    seen = context(places)
    for n in (4, 5, 7) if is_open else (None,):
        kept = keep.parse(text).include(seen, n)
        check(seen.scores, seen.v, kept.probability, kept.weight)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_scores_values_probabilities_and_weights(data: st.DataObject) -> None:
    keys = data.draw(st.integers(1, 7))
    numbers = st.floats(-30, 30, width=32)
    chances = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.001, 0.999))
    weights = st.floats(0.01, 100)
    scores = torch.tensor([[data.draw(numbers) for _ in range(keys)]], dtype=torch.float64)
    values = torch.tensor(
        [[data.draw(numbers), data.draw(numbers)] for _ in range(keys)], dtype=torch.float64
    )
    p = torch.tensor([[data.draw(chances) for _ in range(keys)]], dtype=torch.float64)
    w = torch.tensor([[data.draw(weights) for _ in range(keys)]], dtype=torch.float64)
    check(scores, values, p, w)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_rule_in_any_context(data: st.DataObject) -> None:
    """Queries, keys and values of any size, queries at any places, up to ten keys, and any size a
    rule can have there.
    """
    keys, queries = data.draw(st.integers(1, 10)), data.draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    q, k, v = (
        torch.randn(rows, 3, generator=generator, dtype=torch.float64)
        for rows in (queries, keys, keys)
    )
    places = data.draw(
        st.none() | st.lists(st.integers(0, keys - 1), min_size=queries, max_size=queries)
    )
    sharp, size = (
        data.draw(st.sampled_from([0.0, 0.5, 3.0, 20.0])),
        data.draw(st.sampled_from([1e-3, 1.0, 1e3])),
    )
    seen = keep.Context.of(sharp * q, k, size * v, positions=places)
    given = torch.rand(keys, generator=generator, dtype=torch.float64)
    rules = [
        Given(given),
        Given(given, reweight=False),
        *(keep.parse(text) for text, _ in RULES),
    ]
    rule = data.draw(st.sampled_from(rules))
    try:
        rule.check(seen, 1 if rule.free else None)
    except ValueError:
        return  # a number of the rule is more than there are keys
    n = data.draw(st.integers(rule.least(seen), keys)) if rule.free else None
    kept = rule.include(seen, n)
    check(seen.scores, seen.v, kept.probability, kept.weight)


def test_one_probability_for_all_is_the_bernoulli_integral() -> None:
    seen = context()
    n = [1, 3, 8]
    known = error_from_nodes(seen.scores, None, seen.v, None, n, sampling="bernoulli", details=True)
    assert known.bias is not None
    for j, count in enumerate(n):
        kept = keep.Random().include(seen, count)
        found = inclusion_error(seen.scores, seen.v, kept.probability)
        np.testing.assert_allclose(found.mse[:, 0], known.mse[:, j], rtol=1e-12)
        np.testing.assert_allclose(found.sum_p2[:, 0], known.sum_p2[:, j], rtol=1e-12)
        np.testing.assert_allclose(found.bias[:, 0], known.bias[:, j], rtol=1e-9, atol=1e-12)


def test_a_sure_set_is_the_softmax_over_it() -> None:
    seen = context()
    kept = keep.parse("sinks:2+recent:3").include(seen)
    found = inclusion_error(seen.scores, seen.v, kept.probability)
    alone = torch.softmax(seen.scores.masked_fill(~kept.sure, -torch.inf), 1)
    bias = (alone @ seen.v - seen.limit).numpy()
    np.testing.assert_allclose(found.bias[:, 0], bias, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(found.mse[:, 0], (bias**2).sum(1), rtol=1e-11)


def test_a_common_offset_costs_no_digits() -> None:
    generator = torch.Generator().manual_seed(2)
    values = (
        torch.round(torch.randn(KEYS, 3, generator=generator, dtype=torch.float64) * 2**20) / 2**20
    )
    seen = context()
    p = torch.rand(5, KEYS, generator=generator, dtype=torch.float64)
    here, there = (
        inclusion_error(seen.scores, values + offset, p, 1 / p).mse for offset in (0, 2.0**30)
    )
    np.testing.assert_allclose(here, there, rtol=1e-11)
