"""What is kept of a cache: one set for all later queries, n of each head, one cut over all
heads.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from esscher.compress.choose import Cell, Choice, once
from esscher.compress.text import Text
from esscher.hf.interventions import prefill
from esscher.keep import Context, parse
from tests.compress.runs import source

KEYS = 30
CACHED = [
    *(
        "sinks:2+recent",
        "sinks:2+random",
        "sinks:2+recent:4+heavy:pool=3",
        "sinks:2+recent:4+keynorm",
    ),
    *("sinks:2+recent:4+expected", "sinks:2+recent:4+impact", "random:reweight", "neyman:shared"),
]


def observed(seed: int = 0) -> Context:
    """Queries of two heads at the last 8 places."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(rows, 4, generator=g, dtype=torch.float64) for rows in (16, KEYS, KEYS))
    return Context.of(2 * q, k, v, positions=list(range(22, 30)) * 2)


@pytest.mark.parametrize("text", CACHED)
def test_one_set_of_n_keys(text: str) -> None:
    kept = once(parse(text), observed(), 12)
    assert kept.probability.shape == (1, KEYS)
    assert float(kept.probability.sum()) == pytest.approx(12, abs=1e-9)


def test_the_last_query_decides_and_all_that_are_observed_have_a_say() -> None:
    context = observed()
    recent = once(parse("sinks:2+recent"), context, 12).probability[0]
    assert recent.nonzero()[:, 0].tolist() == [0, 1, *range(20, 30)]
    heavy = once(parse("recent:1+heavy"), context, 5).probability[0]
    mean = context.attention.mean(0)
    mean[-1] = -1
    assert set(heavy.nonzero()[:, 0].tolist()) == {29, *mean.topk(4).indices.tolist()}


@pytest.fixture(scope="module")
def text() -> Text:
    found = source(
        "llama", rules=["sinks:2+recent:4+impact", "sinks:2+random"], splits=["uniform", "cut"]
    )
    return Text(found, found.ids(int(found.texts[0])), found.prefill, {})


def test_cells_are_what_was_asked_for(text: Text) -> None:
    cells = list(text.plan.cells())
    impact, random = text.source.spec.compared
    assert [cell for cell in cells if cell.rule == impact] == [
        Cell(impact, split, size, 0) for size in (0.2, 0.4, 0.7) for split in ("uniform", "cut")
    ]
    assert [cell for cell in cells if cell.rule == random] == [
        Cell(random, "uniform", size, draw) for size in (0.2, 0.4, 0.7) for draw in (0, 1)
    ]


def test_a_choice_keeps_n_of_every_head_and_is_the_same_again(text: Text) -> None:
    impact, random = text.source.spec.compared
    choice = text.plan.choose(Cell(impact, "uniform", 0.4, 0))
    assert {int(count) for kept in choice.kept.values() for count in kept.sum(1)} == {24}
    one, other = (text.plan.choose(Cell(random, "uniform", 0.4, draw)) for draw in (0, 1))
    again = text.plan.choose(Cell(random, "uniform", 0.4, 0))
    assert torch.equal(one.kept[1], again.kept[1])
    assert not torch.equal(one.kept[1], other.kept[1])
    assert not torch.equal(one.kept[1][0], one.kept[1][1])  # each head has a draw of its own


def test_one_cut_over_all_heads_keeps_the_largest_scores_anywhere(text: Text) -> None:
    """By sorting all scores of all heads: as many keys in all as the uniform split, and none that
    is smaller than one left.
    """
    rule, n = parse("sinks:2+recent:4+impact"), 24
    choice = text.plan.choose(Cell(str(rule), "cut", 0.4, 0))
    kept = torch.cat([choice.kept[layer].flatten() for layer in sorted(choice.kept)])
    scores, held = [], []
    for place in sorted(text.plan.contexts):
        context = text.plan.contexts[place]
        scores.append(parse("impact").order(context))
        index = torch.arange(60)
        held.append((index < 2) | (index >= 56))
    order, always = torch.cat(scores), torch.cat(held)
    assert int(kept.sum()) == n * len(scores)
    assert bool(kept[always].all())
    assert float(order[kept & ~always].min()) >= float(order[~kept].max())
    assert (
        len(
            {int(count) for count in choice.kept[0].sum(1)}
            | {int(count) for count in choice.kept[1].sum(1)}
        )
        > 1
    )


def test_impact_sees_what_lies_behind_the_head(text: Text) -> None:
    """Contexts carry W_O: the model's own, of the heads that share the keys."""
    context = text.plan.contexts[1, 1]
    weight = text.source.loaded.model.model.layers[1].self_attn.o_proj.weight.detach()
    assert context.output is not None
    assert torch.allclose(context.output.flatten(0, 1), weight.T[16:], atol=1e-6)


def test_only_some_heads_lose_keys(text: Text) -> None:
    kept = torch.zeros(2, 60, dtype=torch.bool)
    left = Choice({1: kept}).left(text.calls[1], torch.tensor([True, False, False, True]))
    assert left.allowed.shape == (1, 4, 1, 72)
    assert left.allowed[0, [1, 2]].all()
    assert not left.allowed[0, [0, 3], :, :60].any()
    assert left.allowed[0, :, :, 60:].all()


def test_a_choice_from_the_prefill_is_that_of_a_prefill_alone(text: Text) -> None:
    """What is kept depends on nothing that comes later: the same keys, queries and values as a
    shorter sequence gives.
    """
    seen = []
    prefill(text.source.loaded.model, text.ids[:, : text.tokens], seen.append)
    assert all(torch.equal(call.key[0, 1], text.plan.contexts[call.layer, 1].k) for call in seen)
    assert np.isfinite(text.horizons.median)


def test_rules_of_single_queries_are_refused() -> None:
    found = source("llama", rules=["topk"])
    with pytest.raises(
        ValueError, match="topk chooses keys for each query, and a cache is chosen once"
    ):
        Text(found, found.ids(0), found.prefill, {})
