"""The streaming state of a layer: key-value heads, capped scores, what the pool leaves out,
merging, rows to store.
"""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from esscher.hf.call import AttentionCall, score
from esscher.hf.capture import forward
from esscher.hf.loading import wrap_model
from esscher.probe.measure import LayerState, for_heads, join, layer_tables, pack, unpack
from esscher.probe.pools import capture_queries, corpus_layer
from esscher.probe.session import Session, open_session
from esscher.probe.spec import ProbeSpec
from esscher.probe.statistic import LayerInfo, LayerMoments
from esscher.probe.statistics import STATISTICS
from tests.models.probe_runs import captured_layers, few_texts, tiny_model
from tests.models.tiny import inputs_of, model_of


def context_on(
    tmp_path_factory: pytest.TempPathFactory, name: str, kind: str = "llama", part: int = 131072
) -> Session:
    """A tiny model of a family on 600 tokens of prose."""
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text("\n".join(few_texts()), encoding="utf-8")
    fields = {"window": 64, "queries": 10, "kept_queries": 4, "batch": 256, "pool": "corpus"}
    fields["part"] = part
    spec = ProbeSpec.read(
        {"model": "tiny", "corpus": {"text": [str(path)], "max_tokens": 600}, **fields}
    )
    return open_session(spec, wrap_model(*tiny_model(name, kind)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return context_on(tmp_path_factory, "llama")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return context_on(tmp_path_factory, "llama", part=200)


@pytest.fixture(scope="module")
def whole(llama: Session) -> LayerState:
    return corpus_layer(llama, 1, 0)


def tables_of(source: Session, state: LayerState) -> pd.DataFrame:
    return layer_tables(source, replace(state, heads=dict(state.heads)))["heads"]


def joined(source: Session, *, stored: bool = False) -> LayerState:
    """All parts of a layer."""
    states = [corpus_layer(source, 1, part) for part in range(len(source.parts))]
    if stored:
        states = [unpack(pack(state), STATISTICS) for state in states]
    first, *others = states
    for other in others:
        first = join(first, other, STATISTICS)
    return first


def assert_same_tables(one: pd.DataFrame, other: pd.DataFrame, rtol: float) -> None:
    numbers = one.select_dtypes("number").columns
    pd.testing.assert_frame_equal(one[numbers], other[numbers], rtol=rtol, check_exact=False)
    # words with rounded numbers in them
    for name in set(one.columns) - set(numbers) - {"regime_reason"}:
        assert list(one[name]) == list(other[name]), name


@pytest.mark.parametrize("stored", [False, True])
def test_parts_of_the_corpus_merge_to_one_pass(
    llama: Session, parts: Session, whole: LayerState, stored: bool
) -> None:
    merged = joined(parts, stored=stored)
    assert len(parts.parts) == 3
    for name in ("hidden", "pair"):
        a, b = (getattr(state.moments, name) for state in (merged, whole))
        torch.testing.assert_close(a.cov, b.cov, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(a.mean, b.mean, rtol=1e-6, atol=1e-9)
    assert_same_tables(tables_of(parts, merged), tables_of(llama, whole), 1e-5)


def test_heads_share_threads_and_each_gives_the_bits_of_one_thread(
    llama: Session,
) -> None:
    before, cpu = torch.get_num_threads(), torch.device("cpu")
    heads, barrier = [3, 1, 2], threading.Barrier(3, timeout=60)  # passed by three at once

    def threads(head: int) -> tuple[int, int]:
        barrier.wait()
        return head, torch.get_num_threads()

    try:
        torch.set_num_threads(6)
        assert list(for_heads(threads, heads, cpu)) == [(head, 2) for head in heads]
        assert torch.get_num_threads() == 6
        torch.set_num_threads(1)
        alone = corpus_layer(llama, 1, 0)
        torch.set_num_threads(4)
        assert pack(corpus_layer(llama, 1, 0)) == pack(alone)
    finally:
        torch.set_num_threads(before)


def test_bytes_give_the_state_back(llama: Session, whole: LayerState) -> None:
    again = unpack(pack(whole), STATISTICS)
    assert list(again.heads) == [0, 1, 2, 3]
    assert again.info == whole.info
    assert_same_tables(tables_of(llama, again), tables_of(llama, whole), 1e-5)


def test_a_head_that_failed_keeps_its_reason_through_rows_and_merges(
    llama: Session, whole: LayerState
) -> None:
    broken = replace(whole, heads={**whole.heads, 2: "its scores are too wide"})
    again = unpack(pack(broken), STATISTICS)
    assert again.heads[2] == "its scores are too wide"
    for merged in (join(again, whole, STATISTICS), join(whole, again, STATISTICS)):
        assert merged.heads[2] == "its scores are too wide"
        assert not isinstance(merged.heads[1], str)
    table = tables_of(llama, again)
    assert list(table["status"]) == ["ok", "ok", "failed", "ok"]
    assert list(table["kv_head"]) == [0, 0, 1, 1]
    assert table["reason"][2] == "its scores are too wide"
    assert math.isnan(table["beta_fit"][2])


def test_moments_are_those_of_the_pooled_tokens(llama: Session, whole: LayerState) -> None:
    seen = captured_layers(llama)[1]
    cov, width = whole.moments.pair.cov, seen[0].query.shape[-1]
    halves = slice(None, width), slice(width, None)
    for name, own in zip(("query", "key"), halves, strict=True):
        rows = torch.cat(
            [getattr(c, name)[0][:, torch.from_numpy(llama.pooled[w])] for w, c in enumerate(seen)],
            dim=1,
        ).double()
        rows = rows.repeat_interleave(len(cov) // len(rows), 0)
        centred = rows - rows.mean(1, keepdim=True)
        torch.testing.assert_close(
            cov[:, own, own], centred.mT @ centred / rows.shape[1], rtol=1e-5, atol=1e-8
        )


def joint_reach(source: Session, layer: int) -> list[float]:
    """Largest eigenvalue of the covariance of (q, k) of every head, from all pooled tokens at
    once.
    """
    seen = captured_layers(source)[layer]
    q, k = (
        torch.cat(
            [
                getattr(c, name)[0][:, torch.from_numpy(source.pooled[w])]
                for w, c in enumerate(seen)
            ],
            dim=1,
        ).double()
        for name in ("query", "key")
    )
    pairs = [torch.cat([q[head], k[head * len(k) // len(q)]], dim=1) for head in range(len(q))]
    return [float(torch.linalg.matrix_norm(torch.cov(pair.T, correction=0), 2)) for pair in pairs]


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen3"])
def test_reach_is_that_of_queries_and_keys_together(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    """Rotary positions, norms; key-value heads of their own or shared; in one pass, merged, and
    through rows.
    """
    source, cut = context_on(tmp_path_factory, name), context_on(tmp_path_factory, name, part=200)
    one, merged = corpus_layer(source, 1, 0), joined(cut, stored=True)
    truth = joint_reach(source, 1)
    for own, state in ((source, one), (cut, merged)):
        table = tables_of(own, state)
        assert set(table["token_space"]) == {"query-key"}
        np.testing.assert_allclose(table["reach"], truth, rtol=1e-5)
        np.testing.assert_allclose(table["coupling"], truth * table["horizon"] ** 2, rtol=1e-5)
    halves = one.moments.pair.cov.unflatten(2, (2, -1)).unflatten(1, (2, -1))
    apart = [
        max(float(torch.linalg.matrix_norm(halves[h, i, :, i], 2)) for i in (0, 1))
        for h in range(4)
    ]
    assert max(np.array(truth) / apart) > 1.05  # queries and keys of one token go together


def test_cross_moments_survive_a_large_offset() -> None:
    generator = torch.Generator().manual_seed(4)
    q, k = (
        torch.randn(heads, 300, 5, generator=generator, dtype=torch.float64) + 1e4
        for heads in (6, 2)
    )
    q[:, :, 0] += k[:, :, 1].repeat_interleave(3, 0)
    states = [
        LayerMoments.of(q[:, part], k[:, part], None)
        for part in (slice(0, 0), slice(0, 90), slice(90, 300))
    ]
    whole = states[0].merge(states[1]).merge(states[2])
    for head in range(6):
        truth = torch.cov(torch.cat([q[head], k[head // 3]], dim=1).T, correction=0)
        torch.testing.assert_close(whole.pair.cov[head], truth, rtol=0, atol=1e-7)


def test_queries_come_from_their_places_in_order(llama: Session) -> None:
    queries = capture_queries(llama, [0, 1])[1]
    seen = captured_layers(llama)[1]
    places = zip(llama.queries.windows.tolist(), llama.queries.positions.tolist(), strict=True)
    for i, (window, position) in enumerate(places):
        torch.testing.assert_close(
            queries.q[:, i], seen[window].query[0][:, position], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "llama"), ("gemma2", "llama"), ("t5", "t5"), ("gpt_oss", "llama"), ("gpt2", "gpt2")],
)
def test_sink_mass_by_hand(tmp_path_factory: pytest.TempPathFactory, name: str, kind: str) -> None:
    """Masks, groups, caps, position biases and sink logits are all in the weights of a query's own
    window.

    The special token comes first (llama), last (t5) or not at all (gpt2), where the first token is
    text.
    """
    source = context_on(tmp_path_factory, name, kind)
    queries = capture_queries(source, [0])[0]
    seen = captured_layers(source, np.unique(source.queries.windows))[0]
    by_window = dict(zip(np.unique(source.queries.windows).tolist(), seen, strict=True))
    for i in range(len(source.queries)):
        window, position = int(source.queries.windows[i]), int(source.queries.positions[i])
        captured = by_window[window]
        for head in range(captured.heads):
            own = head // (captured.heads // captured.kv_heads)
            scores = captured.scale * captured.key[0, own] @ captured.query[0, head, position]
            if captured.softcap is not None:
                scores = captured.softcap * torch.tanh(scores / captured.softcap)
            if captured.bias is not None:
                scores = scores + captured.bias.expand(1, captured.heads, -1, -1)[0, head, position]
            allowed = torch.from_numpy(~source.windows.padding[window])
            if captured.allowed is not None:
                allowed = allowed & captured.allowed[0, 0, position]
            weights = scores.exp() * allowed
            extra = 0.0 if captured.sinks is None else float(captured.sinks[head].detach().exp())
            resting = torch.from_numpy(source.windows.special[window]) | (
                torch.arange(len(weights)) == 0
            )
            mass = (float((weights * resting).sum()) + extra) / (float(weights.sum()) + extra)
            assert float(queries.windows["sinks"]["mass"][head, i]) == pytest.approx(
                mass, rel=1e-4, abs=1e-6
            )


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("t5", "position bias of the scores"),
        ("gpt_oss", "sink logit"),
        ("llama", ""),
        ("gemma2", ""),
    ],
)
def test_what_the_pool_leaves_out_is_said(name: str, note: str) -> None:
    family, model = model_of(name)
    seen: list[AttentionCall] = []
    forward(model, inputs_of(family), seen.append)
    info = LayerInfo.of(seen[0])
    assert info.note == (f"left out of the pool: {note}" if note else "")
    assert [info.kv_head(head) for head in range(4)] == (
        [0, 0, 1, 1] if family.kv_heads == 2 else [0, 1, 2, 3]
    )


def test_capped_scores() -> None:
    q, k = torch.randn(3, 4), torch.randn(5, 4)
    torch.testing.assert_close(score(q, k, 0.5), 0.5 * q @ k.T)
    torch.testing.assert_close(score(q, k, 0.5, 0.3), 0.3 * torch.tanh(0.5 * q @ k.T / 0.3))
