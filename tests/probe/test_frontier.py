"""Keep rules on the heads of a model: the errors by hand, who decides together, and what is said of
a head.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import esscher as es
from esscher.corpus.windows import token_texts
from esscher.errors.doubling import inclusion_error
from esscher.hf.call import AttentionCall
from esscher.hf.gradients import DRAWS
from esscher.intervals import mean_interval
from esscher.probe import session
from esscher.probe.budget import LOSS, SHOWN
from esscher.probe.session import RuleQueries
from esscher.probe.spec import RULES, SHARES, ProbeSpec, kept_sizes
from esscher.probe.statistics import frontier
from esscher.probe.statistics.frontier import compare_rules, kept_first
from tests.models.probe_runs import (
    captured_layers,
    few_texts,
    own_state,
    same_bytes,
    source,
    tiny_model,
)

SMALL: dict[str, Any] = {
    "max_tokens": 126,
    "window": 64,
    "queries": 12,
    "kept_queries": 12,
    "pool": "sequence",
    "positions": (63,),
    "n": "16,32,48",
    "layers": (1,),
    "heads": (1, 2),
}
ONE_SET = ("streamingllm", "strided", "heavy", "keynorm", "topk")  # nothing is left to chance
SLIDING = 50  # keys that a query of one of the models sees
CHANCES = ("random", "topk:8+random:reweight", "neyman:shared")


def probe(name: str, out: Path, **more: Any) -> Any:
    model, words = tiny_model(name, **more.pop("options", {}))
    return es.probe(model, few_texts(), tokenizer=words, out=out, **{**SMALL, **more})


class ByHand:
    """Queries, keys and values of one window for the heads that share a key-value head, in float64:
    those that choose, and those that are judged, each over all keys that it sees.
    """

    def __init__(self, run: Any, window: int, head: int) -> None:
        found = source(run)
        asked = found.rule_queries(window)
        captured = captured_layers(found, [window])[1][0]
        self.share = captured.heads // captured.kv_heads
        self.first = head // self.share * self.share
        self.text = np.flatnonzero(~found.windows.padding[window])
        self.scale, self.queries = captured.scale, len(asked.judged)
        self.k, self.v = (
            x[0, head // self.share, self.text].double() for x in (captured.key, captured.value)
        )
        sharing = range(self.first, self.first + self.share)

        def queries(positions: np.ndarray) -> tuple[torch.Tensor, ...]:
            places = positions[:, None]
            seen = np.ones((len(places), len(self.text)), bool)
            if found.loaded.causal:
                seen = self.text <= places
            if "sliding_window" in found.loaded.model.config.to_dict():
                seen &= self.text > places - SLIDING
            q = torch.cat([captured.query[0, other, positions] for other in sharing]).double()
            visible = torch.from_numpy(np.tile(seen, (self.share, 1)))
            scores = (q @ self.k.T * self.scale).masked_fill(~visible, -torch.inf)
            return visible, scores, torch.softmax(scores, 1)

        _, _, self.choosers = queries(asked.choosing)
        self.visible, self.scores, self.weights = queries(asked.judged)
        self.limit, self.chosen_limit = self.weights @ self.v, self.choosers @ self.v
        self.places = np.tile(np.searchsorted(self.text, asked.judged), self.share)
        self.cache = self.visible.any(0).numpy()  # a key that nobody sees is no key
        if asked.cut is not None:
            self.cache &= self.text < asked.cut
            self.places = np.full_like(self.places, np.flatnonzero(self.cache)[-1])
        self.size = int(self.cache.sum())

    def rows(self, head: int) -> slice:
        return slice((head - self.first) * self.queries, (head - self.first + 1) * self.queries)

    def set_of(self, rule: str, i: int, n: int) -> list[int]:
        """The keys that query i keeps: n of the cache, and all later ones."""
        seen = self.visible[i].numpy()
        keys, later = np.flatnonzero(seen & self.cache), np.flatnonzero(seen & ~self.cache)
        place = int(self.places[i])
        if rule == "streamingllm":
            last = sorted(set(keys[4:]), key=lambda key: (abs(key - place), -key))
            return [*keys[:4], *last[: n - 4], *later]
        if rule == "strided":
            size = min(n, len(keys))
            return [*(keys[::-1][-(-j * len(keys) // size)] for j in range(size)), *later]
        order = {
            "heavy": self.choosers.mean(0),
            "keynorm": -self.k.square().sum(1),
            "topk": self.weights[i],
        }[rule].numpy()
        return [*sorted(keys, key=lambda key: (-order[key], -key))[:n], *later]

    def squared(self, rule: str, head: int, n: int) -> list[float]:
        errors = []
        for i in range(*self.rows(head).indices(len(self.weights))):
            kept = self.set_of(rule, i, n)
            out = self.weights[i, kept] @ self.v[kept] / self.weights[i, kept].sum()
            errors.append(float((out - self.limit[i]).square().sum()))
        return errors

    def chances(self, rule: str, n: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Probabilities and weights (m, keys) of the rules of CHANCES; later keys are kept."""
        inside = self.visible & torch.from_numpy(self.cache)
        p, sure = torch.zeros_like(self.weights), self.visible & ~inside
        if rule == "neyman:shared":
            apart = torch.cdist(self.chosen_limit, self.v)
            gain = self.choosers * apart
            gain = torch.where(self.choosers > 0.5, gain / (1 - self.choosers), gain)
            gain = gain.square().mean(0).sqrt() * inside.any(0)
            low, high = 0.0, 1e9
            for _ in range(200):
                middle = (low * high) ** 0.5 if low else high / 2
                few = (middle * gain).clamp(max=1).sum() < n
                low, high = (middle, high) if few else (low, middle)
            p = (high * gain).clamp(max=1) * inside
        else:
            if rule.startswith("topk:8"):
                top = self.scores.masked_fill(~inside, -torch.inf).topk(8).indices
                sure = sure.scatter(1, top, value=True)
            rest = inside & ~sure
            share = (n - (sure & inside).sum(1).double().mean()) / rest.sum(1).double().mean()
            p = rest * min(float(share), 1.0)
        p = torch.where(sure, 1.0, p)
        return p, None if rule == "random" else torch.where(p > 0, 1 / p, 1.0)


@pytest.fixture(scope="module", params=["llama", "gpt2", "bert", "mistral"])
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Any, dict[int, list[ByHand]]]:
    """A family, a run of two of its heads, and their windows by hand."""
    sliding = {"sliding_window": SLIDING} if request.param == "mistral" else {}
    run = probe(
        request.param,
        tmp_path_factory.mktemp(request.param),
        rules=(*ONE_SET, *CHANCES),
        options=sliding,
    )
    windows = np.unique(source(run).queries.windows).tolist()
    return (
        request.param,
        run,
        {head: [ByHand(run, window, head) for window in windows] for head in (1, 2)},
    )


def rows_of(run: Any, head: int, rule: str) -> pd.DataFrame:
    table = run.table("frontier")
    return table[(table["head"] == head) & (table["rule"] == rule)]


def test_sets_of_keys_by_hand(measured: Any) -> None:
    """Shared rules look at the choosing queries of all heads of a key-value head, asked for or not:
    llama has two of four. Errors are those of the judged.
    """
    name, run, of_heads = measured
    for head, hands in of_heads.items():
        assert hands[0].share == (2 if name in ("llama", "mistral") else 1)
        limits = np.concatenate(
            [hand.limit[hand.rows(head)].square().sum(1).numpy() for hand in hands]
        )
        for rule in ONE_SET:
            rows = rows_of(run, head, rule)
            assert len(rows) >= 6
            for row in rows.itertuples():
                sizes = [kept_sizes(hand.size)[SHARES.index(row.share)] for hand in hands]
                held_out = np.concatenate(
                    [hand.squared(rule, head, n) for hand, n in zip(hands, sizes, strict=True)]
                )
                root = np.sqrt(held_out.mean())
                assert row.rms == pytest.approx(root, rel=1e-4)
                assert row.relative == pytest.approx(root / np.sqrt(limits.mean()), rel=1e-4)
                assert row.q95 == pytest.approx(np.sqrt(np.quantile(held_out, 0.95)), rel=1e-4)
                assert row.accuracy < 1e-5
                if name != "mistral":  # there a query may see fewer of the kept keys
                    assert row.kept == pytest.approx(np.mean(sizes), rel=1e-12)
            assert set(rows["queries"]) == {sum(hand.queries for hand in hands)}


def test_chances_by_hand(measured: Any) -> None:
    _, run, of_heads = measured
    for head, hands in of_heads.items():
        for rule in CHANCES:
            for row in rows_of(run, head, rule).itertuples():
                squares = []
                for hand in hands:
                    n = int(kept_sizes(hand.size)[SHARES.index(row.share)])
                    p, weight = hand.chances(rule, n)
                    found = inclusion_error(hand.scores, hand.v, p, weight)
                    squares.append(torch.from_numpy(found.mse[hand.rows(head), 0]))
                assert row.rms == pytest.approx(float(torch.cat(squares).mean().sqrt()), rel=2e-4)


def test_longformer_linformer_and_rules_of_one_size(tmp_path: Path) -> None:
    """On an encoder: a window and a global token by hand, random mixtures by their formula, rules
    with all their numbers as one point; exponents are those of the rows.
    """
    rules = ("longformer", "longformer:4", "strided:8", "lowrank")
    run = probe("bert", tmp_path, heads=(1,), rules=rules, max_tokens=63, kept_queries=4)
    (hand,) = (ByHand(run, w, 1) for w in np.unique(source(run).queries.windows).tolist())
    keys, rows = np.arange(hand.size), rows_of(run, 1, "longformer")
    assert len(rows) >= 6

    def rms(kept: Any) -> float:
        errors = []
        for i in range(hand.queries):
            own = kept(int(hand.places[i]))
            out = hand.weights[i, own] @ hand.v[own] / hand.weights[i, own].sum()
            errors.append(float((out - hand.limit[i]).square().sum()))
        return float(np.sqrt(np.mean(errors)))

    for row in rows.itertuples():
        n = int(kept_sizes(hand.size)[SHARES.index(row.share)])
        near = rms(lambda p, n=n: [0, *sorted(keys[1:], key=lambda k: (abs(k - p), -k))[: n - 1]])
        assert row.rms == pytest.approx(near, rel=1e-4)
    for rule, kept in (
        ("window:4+global:0", lambda p: (abs(keys - p) <= 4) | (keys == 0)),
        ("strided:8", lambda p: (p - keys) % 8 == 0),
    ):
        (row,) = rows_of(run, 1, rule).to_dict("records")
        sizes = [kept(int(p)).sum() for p in hand.places]
        assert row["kept"] == pytest.approx(np.mean(sizes))
        assert row["share"] == pytest.approx(np.mean(sizes) / hand.size)
        assert row["rms"] == pytest.approx(rms(lambda p, kept=kept: np.flatnonzero(kept(p))))
    size = hand.weights.square().sum(1) * hand.v.square().sum() + hand.limit.square().sum(1)
    for row in rows_of(run, 1, "lowrank").itertuples():
        assert row.rms == pytest.approx(float((size.mean() / row.kept).sqrt()), rel=1e-5)
    rates = run.table("rule_rates").set_index("rule")
    assert rates.loc["lowrank", "exponent"] == pytest.approx(0.5)
    some = rows[rows["share"].between(0.02, 0.25)]
    slope = -np.polyfit(np.log(some["kept"]), np.log(some["rms"]), 1)[0]
    assert rates.loc["longformer", "exponent"] == pytest.approx(slope, rel=1e-9)
    assert set(run.table("budget")["rule"]) == {"longformer", "lowrank"}
    with pytest.raises(ValueError, match="lowrank needs every query to see every key"):
        probe("llama", tmp_path / "causal", rules=("lowrank",))


REPEATS = 2000


def test_random_keys_dropped_by_hand(measured: Any) -> None:
    """2000 draws at two sizes, two heads, four models: four standard errors, 16 comparisons, once
    in 1000 seeds by chance.
    """
    _, run, of_heads = measured
    generator = torch.Generator().manual_seed(3)
    for head, hands in of_heads.items():
        for row in rows_of(run, head, "random").iloc[[3, -2]].itertuples():
            squared = torch.zeros(REPEATS, dtype=torch.float64)
            for hand in hands:
                own, cache = hand.weights[hand.rows(head)], torch.from_numpy(hand.cache)
                n = kept_sizes(hand.size)[SHARES.index(row.share)]
                share = n / (hand.visible & cache).sum(1).double().mean()
                uniform = torch.rand(REPEATS, *own.shape, generator=generator, dtype=torch.float64)
                weights = own * ((uniform < share) | ~cache)
                total = weights.sum(2, keepdim=True)
                out = weights @ hand.v / total.clamp_min(1e-300)
                errors = (
                    torch.where(total > 0, out - hand.limit[hand.rows(head)], 0.0).square().sum(2)
                )
                squared += errors.sum(1)
            squared /= sum(hand.queries for hand in hands)
            assert abs(row.rms**2 - float(squared.mean())) < 4 * float(squared.std()) / REPEATS**0.5


# ---- in nats


def metrics_by_hand(run: Any, window: int) -> torch.Tensor:
    """(heads, width, width) of layer 1: no cache, no capture; a tap before the output projection,
    and explicit sums over draws and places.
    """
    found = source(run)
    model, heads = found.loaded.model, found.loaded.heads
    ids = found.windows.ids[window][~found.windows.padding[window]].astype(np.int64)
    places, taps = len(ids) // 4, []

    def tap(module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        taps.append(torch.zeros_like(args[0], requires_grad=True))
        return (args[0] + taps[0],)

    gpt = model.config.model_type == "gpt2"
    inner = model.transformer.h[1].attn.c_proj if gpt else model.model.layers[1].self_attn.o_proj
    hook = inner.register_forward_pre_hook(tap)
    logp = model(input_ids=torch.from_numpy(ids)[None]).logits[0, -places:].double().log_softmax(-1)
    hook.remove()
    generator = torch.Generator().manual_seed(found.spec.unit_seed({"window": window}))
    total = 0.0
    for _ in range(DRAWS):
        u = torch.rand(places, 1, generator=generator, dtype=torch.float64)
        drawn = (logp.detach().exp().cumsum(-1) < u).sum(1, keepdim=True)
        (g,) = torch.autograd.grad(logp.gather(1, drawn).sum(), taps, retain_graph=True)
        for one in g[0, -places:].double().view(places, heads, -1):
            total += one[:, :, None] * one[:, None, :] / (places * DRAWS)
    return total


def test_nats_by_hand(measured: Any) -> None:
    """Half of e'F e with explicit loops: sets of keys, and the same keys by chance, exactly and by
    2000 draws (six comparisons at four standard errors).
    """
    name, run, of_heads = measured
    table = run.table("frontier")
    if name in ("bert", "mistral"):  # these come without a language head
        assert table["nats"].isna().all()
        assert "fisher" not in run.tables
        return
    windows = np.unique(source(run).queries.windows).tolist()
    metrics = [metrics_by_hand(run, window) for window in windows]
    generator = torch.Generator().manual_seed(5)
    for head, hands in of_heads.items():
        own = [metric[head] for metric in metrics]
        stored = run.table("fisher").query(f"head == {head}").iloc[0]
        factor = np.array(stored["factor"]).reshape(stored["rank"], stored["width"])
        mean = (sum(own) / len(own)).numpy()
        assert np.allclose(factor.T @ factor, mean, atol=1e-4 * np.abs(mean).max())
        assert stored["trace"] == pytest.approx(np.trace(mean), rel=1e-4)
        assert stored["share"] == pytest.approx(1.0)
        assert 0 < stored["stderr"] < stored["trace"]
        for rule in (*ONE_SET, *CHANCES):
            for row in rows_of(run, head, rule).itertuples():
                found = []
                for hand, metric in zip(hands, own, strict=True):
                    n = int(kept_sizes(hand.size)[SHARES.index(row.share)])
                    found.append(nats_of(hand, rule, head, n, metric))
                assert row.nats_windows == pytest.approx(found, rel=1e-3)
                assert (row.nats, row.nats_low, row.nats_high) == pytest.approx(
                    mean_interval(found, least=0.0), rel=1e-3, nan_ok=True
                )
        row = rows_of(run, head, "random").iloc[4]
        for hand, metric, value in zip(hands, own, row["nats_windows"], strict=True):
            n = int(kept_sizes(hand.size)[SHARES.index(row["share"])])
            p, weights = hand.chances("random", n)[0], hand.weights[hand.rows(head)]
            drawn = torch.rand(REPEATS, *weights.shape, generator=generator, dtype=torch.float64)
            left = weights * (drawn < p[hand.rows(head)])
            total = left.sum(2, keepdim=True)
            errors = left @ hand.v / total.clamp_min(1e-300) - hand.limit[hand.rows(head)]
            errors = torch.where(total > 0, errors, 0.0)
            nats = torch.einsum("rmi,ij,rmj->r", errors, metric, errors) / (2 * hand.queries)
            assert abs(value - float(nats.mean())) < 4 * float(nats.std()) / REPEATS**0.5


def nats_of(hand: ByHand, rule: str, head: int, n: int, metric: torch.Tensor) -> float:
    if rule in CHANCES:
        p, weight = hand.chances(rule, n)
        root = torch.linalg.cholesky(metric + 1e-9 * metric.trace() * torch.eye(len(metric)))
        squares = inclusion_error(hand.scores, hand.v @ root, p, weight).mse[hand.rows(head), 0]
        return float(squares.mean()) / 2
    total = 0.0
    for i in range(*hand.rows(head).indices(len(hand.weights))):
        kept = hand.set_of(rule, i, n)
        out = hand.weights[i, kept] @ hand.v[kept] / hand.weights[i, kept].sum()
        error = (out - hand.limit[i]).tolist()
        for a in range(len(error)):
            for b in range(len(error)):
                total += error[a] * float(metric[a, b]) * error[b] / 2
    return total / hand.queries


def test_kept_tokens_by_hand(measured: Any) -> None:
    """The heads that keep each token of the first window, at the sizes of the budget."""
    name, run, of_heads = measured
    found = source(run)
    window = min(found.rule_windows)
    call, asked = captured_layers(found, [window])[1][0], found.rule_queries(window)
    hands = {hand[0].first // hand[0].share: hand[0] for hand in of_heads.values()}
    named = ("streamingllm", "heavy", "keynorm")
    for kv_head, hand in hands.items():
        orders = kept_first(call, asked, kv_head, [es.keep.parse(rule) for rule in named])
        for rule, n in itertools.product(named, (6, 20)):
            kept = [hand.text[key] for key in hand.set_of(rule, 0, n) if hand.cache[key]]
            assert sorted(orders[named.index(rule), :n].tolist()) == sorted(kept)
    if name in ("bert", "mistral"):  # without losses no rule is recommended in nats
        assert "tokens" not in run.tables
        return
    ids, table = found.windows.ids[window][: asked.cut], run.table("tokens")
    rule = table["rule"].iloc[0]
    assert rule in ("streamingllm", "heavy", "keynorm")
    for keep, own in table.groupby("keep"):
        budget = es.budget(run, rule, kl=LOSS)
        if not np.isclose(budget.totals["ratio"], keep).any():
            keys = budget.caches["n_keys"].sum()
            budget = es.budget(run, rule, total=round(keep * keys))
            assert keep == pytest.approx(min(SHOWN, key=lambda share: abs(share - keep)), abs=0.05)
        counts = np.zeros(len(ids), int)
        for cache in budget.caches.itertuples():
            hand = hands[cache.kv_head]
            kept = hand.set_of(rule, 0, round(cache.best_split))
            counts[[hand.text[key] for key in kept if hand.cache[key]]] += 1
        assert own["heads"].map(list).tolist() == [[count] for count in counts]
        assert own["heads_all"].map(list).tolist() == [[len(hands)]] * len(ids)
        assert own["token"].tolist() == token_texts(found.loaded.tokenizer, ids.tolist())
    assert table["keep"].nunique() > 1


# ---- who chooses and who is judged
# ------------------------------------------------------------------------------------------


def test_a_querys_error_does_not_depend_on_how_many_are_judged(tmp_path: Path) -> None:
    """The last query of a window, with two and with six judged in it: the same keys are kept."""
    found = []
    for queries in (4, 12):
        run = probe(
            "llama", tmp_path / str(queries), queries=queries, rules=("heavy", "neyman:shared")
        )
        known = own_state(source(run), 1).heads[1]
        assert not isinstance(known, str)
        assert len(known.found["frontier"]["mse"]) == queries
        found.append(known.found["frontier"]["mse"][[queries // 2 - 1, queries - 1]])
    torch.testing.assert_close(*found, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("queries", [2, 12, 60])
def test_queries_before_the_cut_choose_and_later_ones_are_judged(
    tmp_path: Path, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "OBSERVE", 7)
    monkeypatch.setattr(session, "DECODE", 9)
    run = probe("gpt2", tmp_path, queries=queries, kept_queries=queries, rules=("heavy",))
    asked = source(run).rule_queries(0)
    assert asked.cut == 55
    assert asked.choosing.tolist() == list(range(48, 55))
    assert len(asked.judged) == min(9, queries // 2)
    assert asked.judged[-1] == 63
    assert (asked.judged >= 55).all()
    assert set(run.table("frontier")["keys"]) == {55.0}
    assert set(run.table("frontier")["queries"]) == {2 * len(asked.judged)}


def test_of_short_windows_a_quarter_is_judged_and_half_of_the_rest_chooses(tmp_path: Path) -> None:
    """63 tokens of text behind a special one: 15 are judged, or an even part of them."""
    asked = source(probe("gpt2", tmp_path, rules=("heavy",))).rule_queries(0)
    assert (asked.cut, len(asked.choosing), asked.choosing[-1]) == (49, 24, 48)
    assert asked.judged.tolist() == [50, 53, 55, 58, 60, 63]


@pytest.mark.parametrize(("observe", "queries"), [(7, 12), (64, 12), (64, 120)])
def test_an_encoders_choosers_are_drawn_from_the_other_tokens(
    tmp_path: Path, observe: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "OBSERVE", observe)
    run = probe("bert", tmp_path, queries=queries, positions=None, rules=("topk",))
    found = source(run)
    for window in (0, 1):
        asked = found.rule_queries(window)
        text = np.flatnonzero(found.windows.text[window])
        assert asked.cut is None
        assert set(asked.judged) <= set(found.queries.positions[found.queries.inside(window)])
        assert len(asked.judged) == min(queries // 2, len(text) // 2)
        assert len(asked.choosing) == min(observe, len(text) // 2)
        assert set(asked.choosing) <= set(text) - set(asked.judged)
    assert not np.array_equal(found.rule_queries(0).choosing, found.rule_queries(1).choosing)


# ---- what a run has
# ------------------------------------------------------------------------------------------


def test_rules_by_default_as_objects_and_none(tmp_path: Path) -> None:
    assert ProbeSpec(pool="sequence").compared == RULES
    assert ProbeSpec(pool="sequence", rules=()).compared == ProbeSpec().compared == ()
    assert ProbeSpec.read({"pool": "sequence", "rules": "none"}).compared == ()
    assert ProbeSpec.read(
        {"pool": "sequence", "rules": ["streamingllm", "topk", "sinks:4+recent"]}
    ).rules == (
        *("streamingllm", "topk"),  # by its short name, and once
    )
    run = probe(
        "bert",
        tmp_path / "given",
        heads=(1,),
        rules=[es.keep.Sinks(2) | es.keep.Recent(), es.keep.TopK()],
    )
    assert run.table("frontier")["rule"].unique().tolist() == ["sinks:2+recent", "topk"]
    (row,) = run.table("heads").to_dict("records")
    assert (row["kind"], row["kind_reason"]) == ("", "")  # the rules that tell it are not there
    assert np.isnan(row["floor_kept_10pct"])
    none = probe("bert", tmp_path / "none", heads=(1,), rules=())
    assert "frontier" not in none.tables
    assert "kind" not in none.table("heads")


def test_sizes_that_a_window_is_too_short_for_have_no_row(tmp_path: Path) -> None:
    """32 keys: 1, 2, 3, 5, 6, 8, 13, 19 and 26 of them are kept, equal sizes once; 16 keys fit into
    the last two only.
    """
    rules = ("topk", "streamingllm", "topk:16+random")
    run = probe(
        "bert",
        tmp_path,
        window=32,
        positions=None,
        max_tokens=310,
        n="16,24",
        heads=(1,),
        rules=rules,
    )
    kept = {rule: rows["kept"].tolist() for rule, rows in run.table("frontier").groupby("rule")}
    assert kept == {
        "topk": [1, 2, 3, 5, 6, 8, 13, 19, 26],
        "streamingllm": [5, 6, 8, 13, 19, 26],
        "topk:16+random": [pytest.approx(19), pytest.approx(26)],
    }


def test_errors_are_of_whole_windows_that_hold_the_queries_asked_for(tmp_path: Path) -> None:
    """Two windows of six queries: four or six are asked of the first, seven of both."""
    both = probe("bert", tmp_path / "both", heads=(1,), rules="topk", kept_queries=7)
    assert set(both.table("frontier")["queries"]) == {12}
    one = probe("bert", tmp_path / "one", heads=(1,), rules="topk", kept_queries=4)
    assert set(one.table("frontier")["queries"]) == {6}
    hand = ByHand(one, int(source(one).queries.windows[0]), 1)
    row = rows_of(one, 1, "topk").iloc[-2]
    squared = hand.squared("topk", 1, kept_sizes(hand.size)[SHARES.index(row["share"])])
    assert row["rms"] == pytest.approx(np.sqrt(np.mean(squared)), rel=1e-4)


def test_two_heads_that_share_their_keys_choose_together() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 20, 4, generator=generator) for _ in range(3))
    rows = np.arange(20)
    asked = RuleQueries(rows[8:16], rows[16:], 16)
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    call = AttentionCall(0, "", q[None], k[None, :1], v[None, :1], 0.5, mask)
    by_head = compare_rules(call, asked, 0, [es.keep.Heavy()])
    assert list(by_head) == [0, 1]
    weights = torch.softmax(call.scores()[0].double(), 2)
    order = weights[:, 8:16].mean((0, 1)).argsort(descending=True).tolist()
    for i, n in enumerate(kept_sizes(16)):
        for head, row in itertools.product(range(2), range(4)):
            kept, own = [*order[:n], *range(16, 17 + row)], weights[head, 16 + row]
            out = own[kept] @ v[0, kept].double() / own[kept].sum()
            error = float((out - own @ v[0].double()).square().sum())
            found = float(by_head[head]["mse"][row, 0, i])
            assert found == pytest.approx(error, rel=1e-4, abs=1e-9)
    q[0, 9, 1] = torch.inf
    with pytest.raises(ValueError, match="beyond the floating range"):
        compare_rules(call, asked, 0, [es.keep.Heavy()])


def test_a_run_that_lost_its_work_finds_the_same_bytes(tmp_path: Path) -> None:
    model, words = tiny_model("llama")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(few_texts()), encoding="utf-8")
    settings = {
        **SMALL,
        "layers": (0, 1),
        "heads": (1,),
        "queries": 4,
        "rules": ("random", "heavy"),
    }
    runs = [
        es.probe(model, text, tokenizer=words, out=tmp_path / name, **settings)
        for name in ("one", "two")
    ]
    sorted((runs[1].path / "shards").iterdir())[0].unlink()
    for path in runs[1].path.glob("*.parquet"):
        path.unlink()
    again = es.probe(model, text, tokenizer=words, out=runs[1].path, **settings)
    assert again.status == "complete"
    assert same_bytes(runs[0].path, again.path, ("heads", "curves", "frontier"))


# ---- what is said of a head
# ------------------------------------------------------------------------------------------


def curve(*points: tuple[float, float]) -> pd.DataFrame:
    return pd.DataFrame(points, columns=["kept", "relative"])


def test_keys_needed_by_interpolation() -> None:
    law = curve(*((n, 3 / n**0.5) for n in (10.0, 100.0, 1000.0)))
    assert frontier._needed(law, 0.1) == pytest.approx(900)
    assert frontier._needed(law, 0.95) == 10
    assert frontier._needed(law, 0.05) == np.inf
    assert frontier._needed(curve((10, 0.5), (20, 0.0)), 0.1) == 20  # no logarithm of 0
    assert frontier._needed(curve((10, 0.0), (20, 0.0)), 0.1) == 10
    assert frontier._needed(curve((10, np.inf), (20, 0.05)), 0.1) == 20
    assert frontier._needed(curve((10, 0.5), (60, 0.2)), 0.1, keys=100.0) == pytest.approx(
        1 / (0.01 + (1 / 60 - 0.01) / 4)
    )
    assert frontier._needed(curve((10, 0.5), (60, np.inf)), 0.1, keys=100.0) == 100


@pytest.mark.parametrize(
    ("stream", "random", "best", "kind"),
    [
        (0.20, 0.40, 0.01, "streams"),
        (0.25, 0.25, 0.25, "streams"),
        (0.26, 0.55, 0.10, "retrieves"),
        (0.20, 0.15, 0.05, "averages"),  # random keys do with fewer
        (0.20, 0.15, 0.03, "retrieves"),
        (0.50, 0.40, 0.11, "averages"),
        (0.90, 0.90, 0.22, "retrieves"),
        (0.90, 0.90, 0.23, "averages"),
        (0.95, 0.98, 0.97, "averages"),
    ],
)
@pytest.mark.parametrize("chosen", ["neyman", "topk"])
def test_kinds(stream: float, random: float, best: float, kind: str, chosen: str) -> None:
    """Errors sqrt(1/n - 1/N), scaled to be 10 % at the share that is asked for, on a ladder that
    ends at 60 %.
    """
    ladder = np.array([1.0, 2, 3, 5, 8, 10, 11, 15, 20, 22, 23, 25, 26, 40, 55, 60])
    shares = {"streamingllm": stream, "random": random, "neyman": 0.98, chosen: best}
    curves = {}
    for rule, share in shares.items():
        scale = 0.1 / np.sqrt(1 / share - 1)
        curves[rule] = curve(
            *zip(ladder, scale * np.sqrt(100 / ladder - 1) * (1 - 1e-9), strict=True)
        )
    found = frontier._kind(curves, 100.0)
    assert found["kind"] == kind
    assert found["kind_reason"].startswith(
        f"{frontier.KINDS[kind]}; of the keys, for an error of 10 %: streamingllm "
    )
    if (stream, chosen) == (0.90, "topk"):
        assert f"streamingllm 90.0%, random 90.0%, topk {best:.1%}" in found["kind_reason"]


def test_the_best_rule_and_the_best_for_a_cache() -> None:
    found = frontier._fewest(
        {
            "random": 80.0,
            "heavy": 12.0,
            "topk": 4.0,
            "neyman:shared": 9.0,
            "neyman": 3.0,
            "keynorm": np.inf,
        }
    )
    assert found == {
        "best_rule": "topk",
        "best_kept": 4,
        "cache_rule": "neyman:shared",
        "cache_kept": 9,
        "floor_kept": 3,
    }
    found = frontier._fewest({"random": np.inf, "topk": 4.0})
    assert (found["best_rule"], found["cache_rule"]) == ("topk", "none")
    assert np.isnan([found["cache_kept"], found["floor_kept"]]).all()


def test_the_page_lists_the_rules_of_a_probe() -> None:
    page = (Path(__file__).parents[2] / "docs" / "keep.md").read_text("utf-8")
    listed = page.split("## On real heads")[1].split("compares")[1].split(".\n")[0]
    assert tuple(re.findall("`([^`]+)`", listed)) == RULES
