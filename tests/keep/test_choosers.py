"""Queries that choose keys for others: what is kept and what it costs, by explicit softmax."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import esscher as es
from esscher.errors.keep_curve import KeepErrors
from esscher.keep.context import Context

KEYS, CACHE, DIM = 24, 18, 6
PLACES = list(range(CACHE, KEYS))  # of the judged queries, each sees one key more
SIZES = [2, 5, 9]


def attended(at: int, generator: torch.Generator) -> Tensor:
    """Queries (6, DIM) that score high with keys along one axis."""
    return (
        0.3 * torch.randn(6, DIM, generator=generator, dtype=torch.float64)
        + 4 * torch.eye(DIM, dtype=torch.float64)[at]
    )


def made() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choosing queries attend to keys along the first axis, judged ones along the second too."""
    generator = torch.Generator().manual_seed(5)
    k, v = (torch.randn(KEYS, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    choosing, judged = attended(0, generator), attended(1, generator)
    return choosing, judged + 0.3 * choosing, k, v


def weights(q: Tensor, k: Tensor, places: list[int]) -> Tensor:
    seen = torch.arange(len(k)) <= torch.tensor(places)[:, None]
    return torch.softmax((q @ k.T / DIM**0.5).masked_fill(~seen, -torch.inf), 1)


def cache() -> Context:
    """The first keys are the cache; choosing queries stand at its end, judged ones behind it."""
    choosing, judged, k, v = made()
    columns = torch.arange(CACHE)
    choosers = Context.of(choosing, k, v, positions=[CACHE - 1] * 6).restrict(columns)
    return replace(Context.of(judged, k, v, positions=PLACES).restrict(columns), choosers=choosers)


def error_of(kept: Tensor, places: list[int] = PLACES) -> Tensor:
    """Squared error of each judged query on the keys (m, KEYS) it keeps."""
    _, judged, k, v = made()
    pi = weights(judged, k, places)
    some = pi * kept
    return (some @ v / some.sum(1, keepdim=True) - pi @ v).square().sum(1)


@pytest.mark.parametrize("rule", ["heavy", "impact", "expected"])
@pytest.mark.parametrize("chosen", ["by earlier queries", "by the judged"])
def test_one_set_chosen_by_others(rule: str, chosen: str) -> None:
    choosing, judged, k, v = made()
    by, places = (choosing, [CACHE - 1] * 6) if chosen == "by earlier queries" else (judged, PLACES)
    pi = weights(by, k, places)
    apart = torch.cdist(pi @ v, v)
    loss = pi * apart / (1 - pi)
    q = by / DIM**0.5
    spread = (q - q.mean(0)).T @ (q - q.mean(0)) / len(q)
    order = {
        "heavy": pi.mean(0),
        "impact": loss.square().mean(0).sqrt(),
        "expected": k @ q.mean(0) + (k @ spread * k).sum(1) / 2 + v.norm(dim=1).log(),
    }[rule][:CACHE]
    context = cache() if chosen == "by earlier queries" else replace(cache(), choosers=None)
    curve = KeepErrors(context).curve(es.keep.parse(rule), SIZES)
    for i, n in enumerate(SIZES):
        kept = torch.zeros(KEYS, dtype=torch.bool)
        kept[order.topk(n).indices] = True
        kept[CACHE:] = True
        np.testing.assert_allclose(curve.queries.mse[:, i], error_of(kept), rtol=1e-9)
        assert curve.kept[i] == n


def test_earlier_queries_choose_worse_than_the_judged() -> None:
    held_out = KeepErrors(cache()).curve(es.keep.Heavy(), [5]).rms[0]
    oracle = KeepErrors(replace(cache(), choosers=None)).curve(es.keep.Heavy(), [5]).rms[0]
    assert held_out > 1.5 * oracle


@pytest.mark.parametrize("rule", ["topk", "neyman", "random", "keynorm", "sinks:2+recent"])
def test_rules_that_ask_no_other_query_do_not_care_who_chooses(rule: str) -> None:
    parsed = es.keep.parse(rule)
    one, other = (
        KeepErrors(context).curve(parsed, SIZES)
        for context in (cache(), replace(cache(), choosers=None))
    )
    np.testing.assert_array_equal(one.rms, other.rms)
    assert not any(part.observes for part in parsed.parts)


def test_keys_behind_the_cache_are_kept_and_not_counted() -> None:
    """sinks:2+recent: the first two, and the last of the cache, not of what each query sees."""
    curve = KeepErrors(cache()).curve(es.keep.parse("sinks:2+recent"), [5])
    kept = torch.zeros(KEYS, dtype=torch.bool)
    kept[[0, 1, *range(CACHE - 3, KEYS)]] = True
    np.testing.assert_allclose(curve.queries.mse[:, 0], error_of(kept), rtol=1e-9)
    assert curve.kept[0] == 5


def test_weights_of_a_query_are_those_of_all_its_keys() -> None:
    """The chances of each query: p = min(1, lambda pi |c|), pi and c those of all keys."""
    _, judged, k, v = made()
    pi = weights(judged, k, PLACES)
    gain = pi * torch.cdist(pi @ v, v)
    gain = torch.where(pi > 0.5, gain / (1 - pi), gain)[:, :CACHE]
    p = es.keep.Neyman().include(cache(), 6).probability
    np.testing.assert_allclose(p.sum(1), 6, rtol=1e-9)
    some = (p > 0) & (p < 1)
    scale = (p / gain).masked_fill(~some, 0.0).amax(1, keepdim=True)
    np.testing.assert_allclose(p, (scale * gain).clamp(max=1), rtol=1e-9)


def test_public_function() -> None:
    choosing, judged, k, v = made()
    curve = es.exact_pool_curve(judged, k, v, SIZES, keep="heavy", chosen_by=choosing)
    order = weights(choosing, k, [KEYS - 1] * 6).mean(0)
    for i, n in enumerate(SIZES):
        kept = torch.zeros(KEYS, dtype=torch.bool)
        kept[order.topk(n).indices] = True
        np.testing.assert_allclose(
            curve.queries.mse[:, i], error_of(kept, [KEYS - 1] * 6), rtol=1e-9
        )
    with pytest.raises(ValueError, match="chosen_by: matters to a keep rule; give keep too"):
        es.exact_pool_curve(judged, k, v, SIZES, chosen_by=choosing)
