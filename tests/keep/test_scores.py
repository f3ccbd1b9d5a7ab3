"""Scores of keys against loops over single keys: each key is taken out, and the output compared."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from esscher import keep
from esscher.corpus.spec import open_rules
from esscher.keep.context import Context
from esscher.keep.ranked import removal_cost, removal_sums

KEYS, WIDTH, ROWS = 23, 5, 7


def context(sharp: float, sink: bool = False) -> Context:
    """Two heads over the same keys, of which the last 8 are no keys of the cache."""
    g = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    root = normal(2, WIDTH, WIDTH)
    whole = Context(
        sharp * normal(2 * ROWS, 4),
        normal(KEYS, 4),
        normal(KEYS, WIDTH) + 100.0,
        0.5,
        torch.arange(KEYS - ROWS, KEYS).repeat(2),
        heads=torch.arange(2).repeat_interleave(ROWS),
        output=normal(2, WIDTH, 3),
        metric=root @ root.mT,
        norm=normal(2 * ROWS).abs() + 1,
        sink=normal(2 * ROWS) if sink else None,
    )
    return whole.restrict(torch.arange(KEYS - 8))


@pytest.mark.parametrize("sharp", [0.3, 3.0, 40.0], ids=["flat", "sharp", "frozen"])
@pytest.mark.parametrize("sink", [False, True])
def test_removal_cost_is_that_of_each_key_taken_out(sharp: float, sink: bool) -> None:
    rows = context(sharp, sink)
    whole = rows.whole
    wanted = torch.zeros(rows.keys, dtype=torch.float64)
    full = torch.softmax(whole.scores, 1) @ whole.v
    for j in range(rows.keys):
        scores = whole.scores.clone()
        scores[:, j] = -torch.inf
        error = torch.softmax(scores, 1) @ whole.v - full
        for i, head in enumerate(rows.heads.tolist()):
            wanted[j] += error[i] @ rows.metric[head] @ error[i]
    torch.testing.assert_close(removal_cost(rows, removal_sums(rows)), wanted, rtol=1e-8, atol=1e-9)
    fisher = keep.Fisher().order(rows)
    torch.testing.assert_close(fisher, wanted / 2 / (2 * ROWS), rtol=1e-8, atol=1e-9)


def test_without_a_metric_it_is_the_distance_behind_the_output() -> None:
    rows = replace(context(1.0), metric=None)
    behind = removal_cost(rows, removal_sums(rows))
    squares = replace(rows, metric=rows.output @ rows.output.mT)
    torch.testing.assert_close(behind, removal_cost(squares, removal_sums(squares)))


def test_kvzip_is_the_largest_weight_and_kvzip_plus_weighs_it() -> None:
    rows = context(2.0)
    weight = torch.softmax(rows.whole.scores, 1)[:, : rows.keys]
    torch.testing.assert_close(keep.KVzip().order(rows), weight.amax(0))
    wanted = torch.zeros(rows.keys, dtype=torch.float64)
    for i, head in enumerate(rows.heads.tolist()):
        length = (rows.v @ rows.output[head]).norm(dim=1)
        wanted = torch.maximum(wanted, weight[i] * length / rows.norm[i])
    torch.testing.assert_close(keep.KVzipPlus().order(rows), wanted)


def test_kvgrad_weighs_it_by_the_slope_at_the_query() -> None:
    rows = context(2.0)
    slope = torch.linspace(0.1, 3.0, len(rows.q), dtype=torch.float64)
    weight = torch.softmax(rows.whole.scores, 1)[:, : rows.keys]
    wanted = torch.zeros(rows.keys, dtype=torch.float64)
    for i, head in enumerate(rows.heads.tolist()):
        length = (rows.v @ rows.output[head]).norm(dim=1)
        wanted = torch.maximum(wanted, weight[i] * length * slope[i])
    torch.testing.assert_close(keep.KVgrad().order(replace(rows, slope=slope)), wanted)


def test_blocks_of_queries_join_to_the_same_score(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = context(1.0)
    rules = (keep.Fisher(), keep.KVzip(), keep.KVzipPlus(), keep.Heavy(), keep.Impact())
    whole = [rule.order(context(1.0)) for rule in rules]
    monkeypatch.setattr("esscher.keep.rule.PAIRS", 3 * rows.keys)
    for rule, wanted in zip(rules, whole, strict=True):
        torch.testing.assert_close(rule.order(context(1.0)), wanted)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("h2o", "heavy"),
        ("snapkv", "heavy:last=64:pool=5"),
        ("tova", "heavy:last=1"),
        ("restkv", "impact:last=32:pool=5"),
        ("streamingllm", "sinks:4+recent"),
    ],
)
def test_known_names(name: str, text: str) -> None:
    """Understood, and shown in place of what they stand for; heavy is as short as h2o."""
    assert keep.parse(name) == keep.parse(text)
    assert str(keep.parse(text)) == ("heavy" if name == "h2o" else name)
    assert open_rules([name, text]) == (name,)


def test_where_a_rule_runs() -> None:
    found = {text: keep.parse(text).where for text in ("snapkv", "random:reweight", "topk")}
    assert list(found.values()) == ["any cache", "needs weights", "needs all keys"]


def test_a_context_goes_with_its_last_user() -> None:
    """Its tensors do not wait for the garbage collector: thousands are made for one prompt."""
    gc.disable()
    try:
        rows = context(1.0)
        removal_cost(rows, removal_sums(rows))
        known = weakref.ref(rows), weakref.ref(rows.whole)
        del rows
        assert [one() for one in known] == [None, None]
    finally:
        gc.enable()
