"""A kept cache against the masked model: the same logits, in one pass and token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import esscher as es
from esscher.compress.choose import choose
from esscher.compress.text import Text
from esscher.hf.cache import cache_bytes, kept_cache, use_kept
from tests.compress.runs import source

MODELS = ("llama", "gpt2", "gemma", "gpt_oss")


def text_of(model: str) -> Text:
    dtype = "float32" if model == "gpt_oss" else "float64"  # its experts know no float64
    found = source(model, rules=["fisher"], sinks=1, recent=2, dtype=dtype)
    return Text(found, found.ids(int(found.texts[0])), found.prefill)


@pytest.mark.parametrize("model", MODELS)
def test_the_cache_computes_what_the_masked_model_does(model: str) -> None:
    """Ragged heads, sliding windows, sink logits, grouped heads, weights of keys; then tokens one
    at a time.
    """
    text = text_of(model)
    rule = text.source.rules["fisher"]
    choice = choose(text.prompt, rule, 0.4, "cut")
    state = torch.Generator().manual_seed(1)
    weight = {n: 0.5 + 2 * torch.rand(x.shape, generator=state) for n, x in choice.kept.items()}
    choice = replace(choice, weight=weight)
    counts = {int(row.sum()) for rows in choice.kept.values() for row in rows}
    assert len(counts) > 1
    wanted = text.decode(lambda call: text.left(choice, call)).logits[0]
    language, ids = text.source.loaded.model, text.ids[:, text.tokens :]
    before = language.config._attn_implementation
    use_kept(language)
    try:
        with torch.no_grad():
            cache = kept_cache(text.prompt.held.cache, choice.kept, weight=weight)
            found = language(input_ids=ids, past_key_values=cache).logits[0]
            one = kept_cache(text.prompt.held.cache, choice.kept, weight=weight)
            steps = [
                language(input_ids=token[None], past_key_values=one).logits[0] for token in ids.T
            ]
    finally:
        language.set_attn_implementation(before)
    assert cache.get_seq_length() == text.ids.shape[1]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat(steps), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_generate_from_all_keys_is_the_full_model(model: str) -> None:
    text = text_of(model)
    language, ids = text.source.loaded.model, text.ids[:, : text.tokens + 3]
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    before = language.config._attn_implementation
    wanted = language.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    try:
        cache = es.compress(language, ids[:, : text.tokens], keep=1.0)
        assert cache.compression.keep == 1
        assert cache.compression.bytes == cache.compression.bytes_full
        found = language.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **settings
        )
        small = es.compress(language, ids[:, : text.tokens], keep=0.5, rule="heavy")
        assert small.compression.bytes == pytest.approx(0.5 * cache.compression.bytes, rel=0.02)
        assert cache_bytes(small) == small.compression.bytes
        assert small.compression.price.low <= small.compression.price.kl
    finally:
        language.set_attn_implementation(before)
    assert torch.equal(found, wanted)


def test_a_kept_cache_in_use() -> None:
    """Buffers are not copied at every token, beams are sequences of their own, no token can be
    removed, and another attention implementation is refused.
    """
    text = text_of("llama")
    language, ids = text.source.loaded.model, text.ids[:, : text.tokens + 1]
    before = language.config._attn_implementation
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "num_beams": 3}
    mask = torch.ones_like(ids)
    wanted = language.generate(ids, attention_mask=mask, **settings)
    try:
        full = es.compress(language, ids[:, :-1], keep=1.0)
        full.batch_repeat_interleave(3)
        found = language.generate(ids, attention_mask=mask, past_key_values=full, **settings)
        assert torch.equal(found, wanted)
        cache = es.compress(language, ids[:, :-1], keep=0.5)
        layer, places = cache.layers[0], set()
        with torch.no_grad():
            for token in text.ids[0, text.tokens : text.tokens + 9]:
                language(input_ids=token[None, None], past_key_values=cache)
                places.add(layer.buffers[0][0].data_ptr())
            assert len(places) == 1
            assert cache.get_seq_length() == text.tokens + 9
            with pytest.raises(ValueError, match="no token of a kept cache can be removed"):
                cache.crop(-1)
            language.set_attn_implementation("sdpa")
            with pytest.raises(ValueError, match="a kept cache is read by the attention impl"):
                language(input_ids=token[None, None], past_key_values=cache)
    finally:
        language.set_attn_implementation(before)


def test_a_loss_asks_for_the_smallest_cache() -> None:
    text = text_of("llama")
    language, ids = text.source.loaded.model, text.ids[:, : text.tokens]
    before = language.config._attn_implementation
    try:
        costs = [es.compress(language, ids, keep=keep).compression for keep in (0.4, 0.5, 0.7)]
        assert costs[0].price.kl > costs[2].price.kl > 0
        found = es.compress(language, ids, kl=costs[1].price.kl * 1.0001).compression
        assert found.price.kl <= costs[1].price.kl * 1.0001
        assert found.keep <= 0.58  # the ladder of shares is geometric
    finally:
        language.set_attn_implementation(before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "keep, kl: give one of them"),
        ({"keep": 0.1, "kl": 0.1}, "keep, kl: give one of them"),
        ({"keep": 0.0}, "keep: expected a share of the cache above 0"),
        ({"keep": 1.5}, "keep: expected a share of the cache above 0"),
        ({"kl": -1.0}, "kl: expected a loss above 0"),
        ({"kl": float("inf")}, "kl: expected a loss above 0"),
        ({"keep": 0.5, "inputs": torch.full((1, 60), 10**6)}, "inputs: expected token ids from 0"),
        ({"keep": 0.5, "inputs": torch.zeros(1, 128).long()}, "leaves no room to go on"),
        ({"keep": 0.5, "rule": "topk"}, "rule: .*topk chooses keys for each query"),
        ({"keep": 0.5, "split": "half"}, "split: expected one of uniform, cut"),
        ({"keep": 0.5, "rule": "recent", "split": "cut"}, "split: recent has no scores"),
        ({"keep": 0.5, "recent": 200}, "inputs: a prompt of 60 tokens"),
        ({"keep": 0.5, "inputs": "some text"}, "inputs: text needs its tokenizer"),
        ({"keep": 0.5, "inputs": torch.zeros(2, 5)}, "inputs: expected the token ids of one"),
    ],
)
def test_refusals(arguments: dict[str, object], message: str) -> None:
    text = text_of("llama")
    given: dict[str, object] = {"inputs": text.ids[:, : text.tokens], **arguments}
    with pytest.raises(ValueError, match=message):
        es.compress(text.source.loaded.model, **given)


def test_a_model_without_a_language_head_is_refused() -> None:
    text = text_of("llama")
    with pytest.raises(ValueError, match="no language head"):
        es.compress(text.source.loaded.model.model, text.ids[:, : text.tokens], keep=0.5)


def test_models_without_a_cache_are_refused() -> None:
    encoder = source("bert", when="every", rules=["random"]).loaded.model
    with pytest.raises(ValueError, match="BertModel is no causal language model"):
        es.compress(encoder, torch.ones(1, 60).long(), keep=0.5)
    with pytest.raises(ValueError, match="model: expected a transformers model, got str"):
        es.compress("gpt2", torch.ones(1, 60).long(), keep=0.5)


def test_wrong_positions_are_refused() -> None:
    """The prompt once more, less than the prompt, or positions that do not go on."""
    text = text_of("llama")
    language, ids = text.source.loaded.model, text.ids[:, : text.tokens]
    before = language.config._attn_implementation
    token, settings = ids[:, :1], {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    try:
        cache = es.compress(language, ids, keep=0.5)
        assert "later are all kept" in str(cache.compression)
        for some, message in ((ids[:, :30], "no more were given"), (ids, "got 59; give ids")):
            cache = es.compress(language, ids, keep=0.5)
            mask = torch.ones_like(some)
            with pytest.raises(ValueError, match=message):
                language.generate(some, attention_mask=mask, past_key_values=cache, **settings)
        cache = es.compress(language, ids, keep=0.5)
        with pytest.raises(ValueError, match="goes on at position 60, got 0"):
            language(input_ids=token, past_key_values=cache, position_ids=torch.tensor([[0]]))
    finally:
        language.set_attn_implementation(before)
