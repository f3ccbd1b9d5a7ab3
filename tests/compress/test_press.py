"""The press for kvpress: by the hooks that its pipeline relies on, and with kvpress itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import esscher as es
from esscher.compress import press as pressing
from esscher.compress.press import EsscherPress
from esscher.compress.text import Text
from tests.compress.runs import source


@pytest.fixture(scope="module")
def text() -> Text:
    found = source("llama", rules=["fisher"], sinks=1, recent=2)
    return Text(found, found.ids(int(found.texts[0])), found.prefill)


def pressed(press: Any, text: Text) -> Any:
    """A cache as kvpress's pipeline makes it."""
    from transformers import DynamicCache

    cache, model = DynamicCache(), text.source.loaded.model
    with torch.no_grad(), press(model):
        model.model(input_ids=text.ids[:, : text.tokens], past_key_values=cache)
    assert not model.model._forward_pre_hooks
    return cache


def test_a_cache_that_is_smaller_for_every_head(text: Text) -> None:
    """The keys that es.compress keeps, and the logits of a decode on them."""
    press = EsscherPress(0.5, split="uniform", sinks=1, recent=2)
    cache, model = pressed(press, text), text.source.loaded.model
    ids = text.ids[:, text.tokens :]
    before = model.config._attn_implementation
    try:
        kept = es.compress(
            model, text.ids[:, : text.tokens], 0.5, None, press.rule, "uniform", sinks=1, recent=2
        )
        for mine, theirs in zip(kept.layers, cache.layers, strict=True):
            assert theirs.keys.shape[2] == text.tokens // 2
            for kv, (keys, values) in enumerate(mine.held()):
                torch.testing.assert_close(theirs.keys[:, kv], keys)
                torch.testing.assert_close(theirs.values[:, kv], values)
        with torch.no_grad():
            wanted = model(input_ids=ids, past_key_values=kept).logits
    finally:
        model.set_attn_implementation(before)
    places = torch.arange(text.tokens, text.ids.shape[1])[None]
    with torch.no_grad():
        found = model(input_ids=ids, past_key_values=cache, position_ids=places).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_heads_of_different_sizes_are_hidden(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a layer whose heads keep as many keys each, the others are gone."""
    press = EsscherPress(0.6, "fisher", "cut", sinks=1, recent=2)
    monkeypatch.setattr(pressing, "_Base", object)
    with pytest.raises(ValueError, match="heads keep different numbers of keys"):
        pressed(press, text)
    monkeypatch.setattr(pressing, "_Base", type("ScorerPress", (), {}))
    cache = pressed(press, text)
    assert press.found is not None
    ragged = []
    for number, layer in enumerate(text.source.loaded.model.model.layers):
        kept = press.found.choice.kept[number]
        counts, length = set(kept.sum(1).tolist()), cache.layers[number].keys.shape[2]
        ragged.append(len(counts) > 1)
        assert counts == {length} or length == text.tokens
        if ragged[-1]:
            _, heads, places = layer.self_attn.masked_key_indices
            hidden = torch.zeros_like(kept)
            hidden[heads, places] = True
            assert torch.equal(hidden, ~kept)
            layer.self_attn.masked_key_indices = None
    assert any(ragged)


def test_scores_are_those_of_the_rule(text: Text) -> None:
    words = text.source.loaded.tokenizer
    sizes = {"sinks": 1, "recent": 2, "observe": text.source.spec.observe}
    press = EsscherPress(0.5, "fisher", "uniform", tokenizer=words, **sizes)
    cache = text.prompt.held.cache
    module = text.source.loaded.model.model.layers[1].self_attn
    given = module, torch.zeros(1, 1, 1), cache.layers[1].keys, cache.layers[1].values, None, {}
    with pytest.raises(ValueError, match=r"press: .* use the press as in"):
        press.score(*given)
    pressed(press, text)
    rule = text.source.rules["fisher"]
    torch.testing.assert_close(press.score(*given)[0], text.prompt.scores(rule)[1])


def test_what_a_press_refuses() -> None:
    with pytest.raises(ValueError, match="compression_ratio: expected a share from 0 up to 1"):
        EsscherPress(1.0)
    with pytest.raises(ValueError, match=r"gives keys weights.*; use fisher\+values"):
        EsscherPress(0.5, "fisher+refit")


@pytest.mark.parametrize("split", ["uniform", "exact"])
def test_the_pipeline_of_kvpress(text: Text, split: str) -> None:
    """At ratio 0 the answer of the full model; at 0.5 keys are gone, or hidden."""
    kvpress = pytest.importorskip("kvpress")
    model, tokenizer = text.source.loaded.model, text.source.loaded.tokenizer
    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    context = tokenizer.decode(text.ids[0, : text.tokens].tolist())
    answers = {}
    for ratio in (None, 0.0, 0.5):
        press = None if ratio is None else EsscherPress(ratio, split=split, sinks=1, recent=2)
        assert press is None or isinstance(press, kvpress.ScorerPress)
        asked = {"question": "What?", "press": press, "max_new_tokens": 4}
        answers[ratio] = pipe(context, **asked)["answer"]
    assert answers[0.0] == answers[None]
    assert isinstance(answers[0.5], str)
