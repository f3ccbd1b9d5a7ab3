"""Which keys are kept, counted by hand: shares of caches whose layers hold different numbers of
keys, thresholds over heads, layers and pages.
"""

from __future__ import annotations

import pytest
import torch

from esscher.compress.choose import PAGE, SPLIT, Choice, cache_rule, choose, default_split, once
from esscher.compress.job import compute
from esscher.compress.per_query import PerQueryText
from esscher.compress.price import predicted
from esscher.compress.prompt import MOVED, Prompt, Settings
from esscher.compress.session import source_of
from esscher.compress.text import Cell, Text
from esscher.hf.call import AttentionCall
from esscher.hf.capture import capture
from esscher.hf.gradients import output_slopes
from esscher.keep import Context, Fisher, KVzip, parse
from tests.compress.runs import WINDOW, source, spec

KEYS = 30
PREFILL = 60
HELD = (WINDOW, WINDOW, PREFILL)  # keys that the caches of the three layers hold: 20, 20 and 60
RULES = ["recent", "sinks:2+keynorm", "sinks:2+random"]
CACHED = [
    *("sinks:2+recent", "sinks:2+random", "sinks:2+recent:4+heavy:pool=3"),
    *("sinks:2+recent:4+expected", "sinks:2+recent:4+impact", "random:reweight", "neyman:shared"),
]


class ByReplay(Fisher):
    name = "by_replay"
    queries = "replay"


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


@pytest.mark.parametrize(
    ("text", "whole", "split"),
    [
        ("fisher", "recent:16+sinks:4+fisher", "cut"),
        ("kvzip", "recent:16+sinks:4+kvzip", "exact"),
        ("heavy:last=3", "recent:16+sinks:4+heavy:last=3", "exact"),
        ("keynorm", "recent:16+sinks:4+keynorm", "uniform"),
        ("sinks:2+heavy", "sinks:2+heavy", "exact"),
        ("recent", "recent", "uniform"),
        ("random", "recent:16+sinks:4+random", "uniform"),
    ],
)
def test_a_score_alone_also_keeps_the_first_and_last_keys(
    text: str, whole: str, split: str
) -> None:
    rule = cache_rule(text, 4, 16)
    assert str(rule) == whole
    assert default_split(rule) == split


def scores(**rows: list[list[float]]) -> dict[int, torch.Tensor]:
    return {i: torch.tensor(row, dtype=torch.float64) for i, row in enumerate(rows.values())}


def test_one_cut_takes_the_largest_scores_anywhere() -> None:
    held = scores(a=[[9.0, 1, 8, 0]], b=[[7.0, 0.5, -torch.inf, 6]])
    sure = {0: torch.tensor([[False, True, False, False]]), 1: torch.zeros(1, 4, dtype=torch.bool)}
    kept = SPLIT["cut"](held, sure, 4 / 7)  # 7 keys are held
    assert kept[0].tolist() == [[True, True, True, False]]
    assert kept[1].tolist() == [[True, False, False, False]]


def test_one_threshold_a_layer_leaves_every_head_a_fifth() -> None:
    """10 keys of each of two heads; half of 20 is 10, and a fifth of the even 5 is one."""
    strong, weak = [float(x) for x in range(100, 110)], [float(x) for x in range(10)]
    kept = SPLIT["layer"](scores(a=[strong, weak]), {0: torch.zeros(2, 10, dtype=torch.bool)}, 0.5)
    assert kept[0].sum(1).tolist() == [9, 1]
    assert bool(kept[0][1, 9])


def test_pages_are_whole_and_the_same_for_all_heads() -> None:
    rows = torch.zeros(2, 4 * PAGE - 5, dtype=torch.float64)
    rows[0, PAGE + 3], rows[1, 3 * PAGE] = 5.0, 9.0
    kept = SPLIT["pages"]({0: rows}, {0: torch.zeros_like(rows, dtype=torch.bool)}, 0.5)[0]
    pages = kept[0].nonzero()[:, 0].div(PAGE, rounding_mode="floor").unique().tolist()
    assert pages == [1, 3]
    assert torch.equal(kept[0], kept[1])


def text(**more: object) -> Text:
    found = source_of(spec("gemma", rules=RULES, **more))
    return Text(found, found.ids(int(found.texts[0])), found.prefill)


@pytest.mark.parametrize(("share", "wanted"), [(0.2, [4, 4, 12]), (0.4, [8, 8, 24])])
def test_uniform_is_the_same_share_of_every_cache(share: float, wanted: list[int]) -> None:
    """20 % are 4, 4 and 12 keys: 20 of 100. The same 12 keys of each would be 36 %."""
    asked = text()
    assert [int(asked.prompt.held_by(place).sum()) for place in asked.prompt.contexts] == list(HELD)
    for rule in RULES[:2]:
        kept = asked.choice(Cell(rule, "uniform", share, 0)).kept
        assert [int(kept[layer].sum()) for layer in range(3)] == wanted


def test_one_cut_keeps_as_many_and_only_what_is_held() -> None:
    kept = text().choice(Cell(RULES[1], "cut", 0.4, 0)).kept
    assert sum(int(layer.sum()) for layer in kept.values()) == 40
    for layer in (0, 1):  # what lies before the window is not in the cache
        assert not bool(kept[layer][:, : PREFILL - WINDOW].any())


def test_stored_shares_are_of_what_the_cache_holds() -> None:
    draws = compute(source("gemma", rules=RULES), {"text": 0})["draws"]
    own = [row for row in draws if row["rule"] == "recent" and row["metric"] == "kl"]
    assert [(row["keep"], row["kept"], row["keys"]) for row in own] == [
        (0.2, pytest.approx(20 / 3), pytest.approx(100 / 3)),
        (0.4, pytest.approx(40 / 3), pytest.approx(100 / 3)),
        (0.7, pytest.approx(70 / 3), pytest.approx(100 / 3)),
    ]


def test_a_layer_that_drops_nothing_keeps_its_whole_cache() -> None:
    draws = compute(source("gemma", rules=["recent"], keep=[0.2], layers=[0]), {"text": 0})["draws"]
    (row,) = [row for row in draws if row["rule"] == "recent" and row["metric"] == "kl"]
    assert row["kept"] / row["keys"] == pytest.approx((4 + 20 + 60) / 100)


def test_queries_that_each_keep_a_few() -> None:
    """Every query keeps 20 % of what a whole window of its layer has: pairs of queries and keys
    counted one by one.
    """
    found = source_of(spec("gemma", rules=["recent"], keep=[0.2], when="every"))
    every = PerQueryText(found, int(found.texts[0]))
    tokens = every.ids.shape[1]  # 72
    kept, _ = every.run(Cell("recent", "uniform", 0.2, 0))
    sizes = [round(0.2 * min(held, tokens)) for held in (WINDOW, WINDOW, tokens)]
    pairs = sum(min(i + 1, size) for size in sizes for i in range(tokens))
    assert kept == pytest.approx(pairs / (3 * tokens))


def test_a_choice_is_the_same_again_and_draws_differ() -> None:
    found = source("llama", rules=["sinks:2+random", "fisher"])
    asked = Text(found, found.ids(int(found.texts[0])), found.prefill)
    for rule, split in (("sinks:2+random", "uniform"), ("fisher", "cut")):
        one, again = (asked.choice(Cell(rule, split, 0.5, 0)).kept for _ in range(2))
        assert all(torch.equal(one[layer], again[layer]) for layer in one)
    other = asked.choice(Cell("sinks:2+random", "uniform", 0.5, 1)).kept
    one = asked.choice(Cell("sinks:2+random", "uniform", 0.5, 0)).kept
    assert not all(torch.equal(one[layer], other[layer]) for layer in one)


def test_a_replay_reads_the_prompt_once_more() -> None:
    """Scores of fisher come from a replay: they are not those of the last queries."""
    found = source("llama", rules=["fisher", "kvzip"])
    asked = Text(found, found.ids(int(found.texts[0])), found.prefill)
    rule = found.rules["kvzip"]
    largest = asked.prompt.scores(rule)
    last = {place: context.attention.amax(0) for place, context in asked.prompt.contexts.items()}
    assert any(not torch.allclose(largest[layer][kv], rows) for (layer, kv), rows in last.items())
    kept = choose(asked.prompt, found.rules["fisher"], 0.5, "cut").kept
    assert all(bool(rows[:, :4].all()) and bool(rows[:, -16:].all()) for rows in kept.values())


def test_fisher_is_the_mean_over_all_kinds_of_queries() -> None:
    """Over a replay, the last queries and the moved ones, which count twice; keys that stand among
    the last queries stay for them.
    """
    found = source("llama", rules=["fisher"], observe=8, dtype="float64")
    asked = Text(found, found.ids(int(found.texts[0])), found.prefill)
    prompt, rule = asked.prompt, found.rules["fisher"]
    replayed = ByReplay()
    alone = Prompt(
        prompt.model, prompt.ids, [replayed], prompt.outputs, prompt.tokenizer, prompt.settings
    )
    metric = prompt.metric
    assert metric is not None
    keys, last = prompt.keys, prompt.spared["last"]
    assert last == 8

    def removed(call: AttentionCall, kv: int, j: int) -> float:
        """Mean cost at these queries, summed over heads, when key j is taken out."""
        cost, values = 0.0, call.value[0, kv]
        for head in range(kv * call.shared, (kv + 1) * call.shared):
            rows = call.weights()[0, head].clone()
            full = rows @ values
            rows[:, j] = 0
            error = rows @ values / rows.sum(1, keepdim=True) - full
            every = error.expand(call.heads, -1, -1)
            cost += float(metric.nats(call.layer, every)[head].mean())
        return cost

    for own, moved in zip(prompt.calls("last"), prompt.calls("moved"), strict=True):
        assert moved.query.shape[2] == keys // MOVED  # few enough queries: all are kept
        for kv in range(own.kv_heads):
            score = prompt.scores(rule)[own.layer][kv]
            of_replay = alone.scores(replayed)[own.layer][kv]
            for j in range(0, keys, 7):
                cost, weight = float(of_replay[j]) + 2 * removed(moved, kv, j), 3
                if j < keys - last:
                    cost, weight = cost + removed(own, kv, j), 4
                assert float(score[j]) == pytest.approx(cost / weight, rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt_oss"])
def test_moved_queries_stand_where_the_text_goes_on(family: str) -> None:
    """Against the queries that the model makes when the prompt stands behind itself; they see what
    the cache holds.
    """
    found = source(family, rules=["fisher"], sinks=1, recent=2)
    ids = found.ids(int(found.texts[0]))[:, : found.prefill]
    settings = Settings(replay=0.0)  # then all queries are moved
    model, rules = found.loaded.model, [found.rules["fisher"]]
    prompt = Prompt(model, ids, rules, found.outputs, settings=settings)
    later: dict[int, AttentionCall] = {}
    with torch.no_grad(), capture(model, lambda call: later.update({call.layer: call})):
        positions = torch.arange(prompt.keys)[None] + 64  # the prompt is one piece
        model(input_ids=ids, position_ids=positions, use_cache=False)
    for call in prompt.calls("moved"):
        torch.testing.assert_close(call.query, later[call.layer].query, rtol=1e-3, atol=1e-4)
        for kv in range(call.kv_heads):
            seen = call.weights(heads=slice(kv * call.shared, kv * call.shared + 1))[0, 0] > 0
            assert torch.equal(seen.any(0), prompt.held_by((call.layer, kv)))


def test_without_a_replay_other_queries_score() -> None:
    """A model with learned positions has the last queries alone."""
    for family, kinds in (("llama", {"last", "moved"}), ("gpt2", {"last"})):
        found = source(family, rules=["fisher"], sinks=1, recent=2, observe=8, replay=0)
        asked = Text(found, found.ids(int(found.texts[0])), found.prefill).prompt
        assert {kind for kind, calls in asked.references.items() if calls} == kinds
        kept = choose(asked, found.rules["fisher"], 0.5, "cut").kept
        assert sum(int(rows.sum()) for rows in kept.values()) > 0
    found = source("llama", rules=["kvzip"], replay=0)
    with pytest.raises(ValueError, match="replay: kvzip scores keys by a replay"):
        Text(found, found.ids(int(found.texts[0])), found.prefill)


def test_slopes_are_gradients_at_the_output_of_attention() -> None:
    """Against autograd at what the projection W_O of each layer returns."""
    found = source("llama", rules=["kvgrad"], dtype="float64")
    asked = Text(found, found.ids(int(found.texts[0])), found.prefill)
    model, ids = found.loaded.model, asked.ids[:, asked.tokens :]
    slopes = output_slopes(asked.prompt.held, ids, found.outputs, lambda call: None)
    added, last = {}, []

    def add(layer: int, out: torch.Tensor) -> torch.Tensor:
        added[layer] = torch.zeros_like(out, requires_grad=True)
        return out + added[layer]

    hooks = [
        block.self_attn.o_proj.register_forward_hook(lambda m, a, out, i=i: add(i, out))
        for i, block in enumerate(model.model.layers)
    ]
    hooks.append(
        model.model.layers[-1].register_forward_hook(
            lambda m, a, out: last.append(out if torch.is_tensor(out) else out[0])
        )
    )
    asked.prompt.held.decode(ids, lambda call: None)
    for hook in hooks:
        hook.remove()
    wanted = torch.autograd.grad(last[0].square().sum(), list(added.values()))
    for layer, gradient in zip(added, wanted, strict=True):
        torch.testing.assert_close(slopes[layer], gradient[0].norm(dim=1), rtol=1e-6, atol=1e-9)


def test_sizes_by_exact_errors_cost_less_than_equal_ones() -> None:
    """At the queries that decide, and with as many keys: the same order of keys in every head, the
    sizes of heads by their exact errors.
    """
    found = source("llama", rules=["fisher"], sinks=1, recent=2, dtype="float64")
    asked = Text(found, found.ids(int(found.texts[0])), found.prefill)
    rule, metric = found.rules["fisher"], asked.prompt.metric
    assert metric is not None

    def cost(choice: Choice) -> float:
        spared = asked.prompt.spared.items()
        return sum(
            predicted(metric, asked.prompt.calls(kind), choice.sparing(last))
            for kind, last in spared
        )

    for share in (0.2, 0.4, 0.7):
        one, other = (choose(asked.prompt, rule, share, split) for split in ("cut", "exact"))
        counts = [sum(int(rows.sum()) for rows in x.kept.values()) for x in (one, other)]
        assert counts[0] == counts[1] == round(share * 240)
        even = choose(asked.prompt, rule, share, "uniform")
        assert cost(other) < min(cost(one), cost(even))


def test_a_share_of_the_prompt_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second piece; the scores are those of its queries alone."""
    monkeypatch.setattr(KVzip, "piece", 10)
    found = source("llama", rules=["kvzip"], sinks=1, recent=2, replay=0.5)
    ids = found.ids(int(found.texts[0]))[:, : found.prefill]
    settings = Settings(8, 1, 2, 0.5)
    prompt = Prompt(found.loaded.model, ids, [found.rules["kvzip"]], {}, None, settings)
    (call,) = prompt.calls("replay", 0)
    assert call.key.shape[2] - 60 == 3 * 10
    whole = Prompt(found.loaded.model, ids, [found.rules["kvzip"]], {}, None, Settings(8, 1, 2))
    for place, score in prompt.replayed.items():
        assert bool((score <= 1).all())
        assert not torch.equal(score, whole.replayed[place])


def test_replayed_pieces_stand_right_behind_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of short pieces are sums of each piece's own: no piece sees another."""
    monkeypatch.setattr(KVzip, "piece", 20)
    found = source("llama", rules=["kvzip"], sinks=1, recent=2)
    ids = found.ids(int(found.texts[0]))[:, : found.prefill]
    rule, settings = found.rules["kvzip"], Settings(8, 1, 2)
    prompt = Prompt(found.loaded.model, ids, [rule], {}, None, settings)
    alone = []
    for piece in torch.split(ids, 20, dim=1):
        seen: list[AttentionCall] = []
        prompt.held.decode(piece, lambda call: None, sink=seen.append)
        alone.append({call.layer: call.weights()[0, :, :, :60].amax(1) for call in seen})
    for (_, (layer, kv)), score in prompt.replayed.items():
        shared = alone[0][layer].shape[0] // 2
        heads = slice(kv * shared, (kv + 1) * shared)
        largest = torch.stack([one[layer][heads].amax(0) for one in alone]).amax(0)
        torch.testing.assert_close(score.to(largest.dtype), largest, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt_oss"])
def test_reference_queries_of_pieces_see_their_own_piece(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together in one call they give the outputs that the model gave them piece by piece."""
    monkeypatch.setattr(KVzip, "piece", 20)
    found = source(family, rules=["kvzip"], sinks=1, recent=2)
    ids = found.ids(int(found.texts[0]))[:, : found.prefill]
    kept: dict[int, list[torch.Tensor]] = {}
    refer = Prompt._refer

    def watched(self: Prompt, call: AttentionCall, many: int) -> None:
        some = torch.linspace(0, 19, min(many, 20)).round().long()
        kept.setdefault(call.layer, []).append(call.output(some)[0])
        refer(self, call, many)

    monkeypatch.setattr(Prompt, "_refer", watched)
    prompt = Prompt(found.loaded.model, ids, [found.rules["kvzip"]], {}, None, Settings(8, 1, 2))
    for layer, outputs in kept.items():
        (call,) = prompt.calls("replay", layer)
        torch.testing.assert_close(call.output()[0], torch.cat(outputs, 1))
        assert call.key.shape[2] == prompt.keys + 60
