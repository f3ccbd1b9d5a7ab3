"""Keys dropped for real: the model's own output where nothing goes, masked attention of its own
code where something does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from esscher.hf.call import AttentionCall
from esscher.hf.interventions import (
    Kept,
    check_acted,
    intervene,
    prefill,
    rule_for_every_query,
)
from esscher.keep import parse
from tests.models.tiny import REFUSED, TOKENS, build, inputs_of, model_of

CACHED = ["gpt2", "llama", "qwen3", "gemma2", "mistral", "gemma3_text", "gpt_oss"]
SEEN = 8  # tokens of a prefill


def output(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**inputs)[0]
    return found


def dropped_pairs(model: Any, inputs: dict[str, torch.Tensor], decide: Any) -> list[int]:
    """By attention call the pairs of a query and a key that its heads lose."""
    before: list[int] = []
    after: list[int] = []

    def pairs(call: AttentionCall) -> int:
        seen = call.visible(torch.arange(call.query.shape[2]))
        return int(seen.expand(-1, call.heads, -1, -1).sum())

    def attend(call: AttentionCall) -> torch.Tensor:
        after.append(pairs(call))
        return call.output()

    with intervene(model, decide, sink=lambda call: before.append(pairs(call)), attend=attend):
        output(model, inputs)
    return [full - kept for full, kept in zip(before, after, strict=True)]


def everything(captured: AttentionCall) -> Kept:
    return Kept(torch.ones(1, 1, 1, 1, dtype=torch.bool))


def without(keys: list[int], count: int) -> Kept:
    allowed = torch.ones(1, 1, 1, count, dtype=torch.bool)
    allowed[..., keys] = False
    return Kept(allowed)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gemma2", "gpt_oss", "t5"])
def test_nothing_dropped_is_the_exact_output(name: str) -> None:
    family, model = model_of(name)
    inputs = inputs_of(family, padded=not family.causal)
    before = output(model, inputs)
    with intervene(model, everything):
        after = output(model, inputs)
    with intervene(model, lambda captured: None):
        again = output(model, inputs)
    assert dropped_pairs(model, inputs, everything) == [0] * family.layers
    assert torch.equal(after, again)
    assert float((after - before)[inputs["attention_mask"].bool()].abs().max()) < 1e-5
    assert torch.equal(output(model, inputs), before)  # the model is as it was


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_dropped_keys_are_those_that_padding_hides(name: str) -> None:
    """An encoder whose last tokens are dropped for every query says of the others what it says when
    they are padding.
    """
    family, model = model_of(name)
    whole = inputs_of(family)
    hidden = {**whole, "attention_mask": whole["attention_mask"].clone()}
    hidden["attention_mask"][:, -3:] = 0
    with intervene(model, lambda captured: without([10, 11, 12], TOKENS)):
        kept = output(model, whole)
    lost = dropped_pairs(model, whole, lambda captured: without([10, 11, 12], TOKENS))
    assert lost == [2 * family.heads * TOKENS * 3] * family.layers
    assert float((kept - output(model, hidden))[:, :-3].abs().max()) < 1e-5
    assert float((kept - output(model, whole)).abs().max()) > 1e-3


@pytest.mark.parametrize("name", CACHED)
def test_a_cache_with_nothing_dropped_continues_as_the_model_does(name: str) -> None:
    family, model = model_of(name)
    ids = inputs_of(family)["input_ids"]
    whole = output(model, {"input_ids": ids})
    held = prefill(model, ids[:, :SEEN])
    with torch.no_grad():
        for _ in range(2):  # the cache is as it was after a decode
            found = held.decode(ids[:, SEEN:], lambda captured: None)
            assert float((found[0] - whole[:, SEEN:]).abs().max()) < 1e-5


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_dropping_the_first_keys_of_a_cache(name: str) -> None:
    """The same as the model's own mask over the whole sequence, in which only the last queries lose
    these keys.
    """
    family, model = model_of(name)
    ids = inputs_of(family)["input_ids"]
    held = prefill(model, ids[:, :SEEN])

    def decide(captured: AttentionCall) -> Kept:
        return without([0, 1, 2, 5], captured.key.shape[2])

    with torch.no_grad():
        found = held.decode(ids[:, SEEN:], decide)
    mask = torch.ones(TOKENS, TOKENS).tril().bool()
    mask[SEEN:, [0, 1, 2, 5]] = False
    added = torch.zeros(2, 1, TOKENS, TOKENS).masked_fill(~mask, torch.finfo(torch.float32).min)
    theirs = output(model, {"input_ids": ids, "attention_mask": added})
    assert float((found[0] - theirs[:, SEEN:]).abs().max()) < 1e-5


def test_one_head_of_one_layer_alone() -> None:
    """Dropped in the last layer for head 2, the attention outputs of the other heads and layers
    stay as they were.
    """
    family, model = model_of("llama")
    ids = inputs_of(family)["input_ids"]

    def decide(captured: AttentionCall) -> Kept | None:
        allowed = torch.ones(1, family.heads, 1, TOKENS, dtype=torch.bool)
        allowed[:, 2, :, :6] = False
        return Kept(allowed) if captured.layer == 1 else None

    outs: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda module, given: outs[dropping].append(given[0].clone())
        )
        for layer in model.model.layers
    ]
    for dropping in (False, True):
        with intervene(model, decide if dropping else lambda captured: None):
            output(model, {"input_ids": ids})
    for hook in hooks:
        hook.remove()
    assert torch.equal(outs[True][0], outs[False][0])
    # (tokens, heads)
    same = (
        (outs[True][1] == outs[False][1]).view(2, TOKENS, family.heads, family.width).all(-1).all(0)
    )
    assert same[:, [0, 1, 3]].all()
    assert not same[6:, 2].any()


def test_weights_count_as_copies_of_a_key() -> None:
    """A key that counts 2 is a key that stands there twice: attention by hand."""
    family, model = model_of("bert")
    inputs = inputs_of(family)
    weight = torch.ones(1, 1, 1, TOKENS, dtype=torch.float64)
    weight[..., 4] = 2.0
    outs: list[torch.Tensor] = []
    hook = model.encoder.layer[0].attention.output.dense.register_forward_pre_hook(
        lambda module, given: outs.append(given[0])
    )
    calls: list[AttentionCall] = []
    with intervene(
        model, lambda c: Kept(torch.ones_like(weight, dtype=torch.bool), weight), sink=calls.append
    ):
        output(model, inputs)
    hook.remove()
    first = calls[0]
    twice = torch.cat([torch.arange(TOKENS), torch.tensor([4])])
    scores = first.scale * first.query @ first.key[:, :, twice].mT
    by_hand = (scores.softmax(-1) @ first.value[:, :, twice]).transpose(1, 2).flatten(2)
    assert len(calls) == family.layers
    assert torch.allclose(outs[0], by_hand, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "bert", "gemma2"])
@pytest.mark.parametrize(
    "text", ["sinks:1+recent", "topk", "heavy", "random", "sinks:1+random:reweight"]
)
def test_every_query_keeps_what_the_rule_says(name: str, text: str) -> None:
    """Where no chance decides, the pairs that went are those that the rule's own inclusion does not
    have.
    """
    family, model = model_of(name)
    inputs = {key: tensor[:1] for key, tensor in inputs_of(family).items()}
    rule, calls = parse(text), []
    full = output(model, inputs)
    decide = rule_for_every_query(rule, lambda layer, kv, keys: 4, torch.Generator().manual_seed(3))
    with intervene(model, decide, sink=calls.append):
        kept = output(model, inputs)
    assert not torch.equal(full, kept)
    assert bool(torch.isfinite(kept).all())
    lost = dropped_pairs(model, inputs, decide)
    assert all(lost)
    assert len(lost) == family.layers
    if "random" not in text:
        rows, dropped = torch.arange(TOKENS), 0
        for call in calls:
            for kv in range(call.kv_heads):
                context = call.context(kv, rows)
                dropped += int(
                    (context.visible & (rule.include(context, 4).probability == 0)).sum()
                )
        assert sum(lost) == dropped


def test_a_query_left_with_nothing_keeps_its_own_key() -> None:
    family, model = model_of("llama")
    inputs = {key: tensor[:1] for key, tensor in inputs_of(family).items()}
    calls: list[AttentionCall] = []
    outs: list[torch.Tensor] = []
    hook = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda module, given: outs.append(given[0])
    )
    with intervene(
        model, lambda c: Kept(torch.zeros(1, 1, 1, TOKENS, dtype=torch.bool)), sink=calls.append
    ):
        output(model, inputs)
    hook.remove()
    own = calls[0].value.repeat_interleave(2, dim=1).transpose(1, 2).flatten(2)
    assert torch.allclose(outs[0], own, atol=1e-6)


@pytest.mark.parametrize("name", ["bloom", "falcon", "gptj"])
def test_a_model_of_its_own_code_is_refused(name: str) -> None:
    model = build(*REFUSED[name])
    with (
        pytest.raises(ValueError, match="computes attention in its own code"),
        intervene(model, everything),
    ):
        pass


def test_a_model_without_a_cache_is_refused() -> None:
    family, model = model_of("distilbert")
    with pytest.raises(
        ValueError, match="keeps no cache of keys; let every query keep a few instead"
    ):
        prefill(model, inputs_of(family)["input_ids"])


def test_dropped_keys_that_change_nothing_are_an_error() -> None:
    """A hook that does nothing would read as a perfect rule: error 0, agreement 1."""
    rows = torch.arange(6.0).view(2, 3)
    check_acted(False, rows, rows)
    check_acted(True, rows, rows + 1)
    with pytest.raises(ValueError, match="did not change in one bit"):
        check_acted(True, rows, rows.clone())
