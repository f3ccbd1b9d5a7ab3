"""Capture on tiny models of every tested family: what is seen is what the model computes with, and
the model stays itself.
"""

from __future__ import annotations

import gc
import importlib
import weakref
from typing import Any

import pytest
import torch
import transformers

from esscher.hf.call import AttentionCall
from esscher.hf.capture import WORKS, StopForward, capture, forward
from tests.models.tiny import BATCH, FAMILIES, REFUSED, Family, build, inputs_of, model_of

# the module has a function of its name
capturing = importlib.import_module("esscher.hf.capture")
NAMES = [family.name for family in FAMILIES]


def caught(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> list[AttentionCall]:
    found: list[AttentionCall] = []
    forward(model, inputs, found.append, **options)
    return found


def weights_by_hand(captured: AttentionCall) -> torch.Tensor:
    """Attention weights from the captured parts, entry by definition, in float64."""
    groups = captured.heads // captured.kv_heads
    key = captured.key.double().repeat_interleave(groups, dim=1)
    scores = captured.scale * torch.einsum("bhik,bhjk->bhij", captured.query.double(), key)
    if captured.softcap is not None:
        scores = captured.softcap * torch.tanh(scores / captured.softcap)
    if captured.bias is not None:
        scores = scores + captured.bias.double()
    weights = torch.exp(scores)
    if captured.allowed is not None:
        weights = weights * captured.allowed
    total = weights.sum(dim=-1, keepdim=True)
    if captured.sinks is not None:
        total = total + torch.exp(captured.sinks.double())[None, :, None, None]
    return weights / total


def eager_weights(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The weights the model's own explicit attention reports."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return tuple(model(**inputs, output_attentions=True).attentions)
    finally:
        model.set_attn_implementation(before)


def real_rows(weights: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Rows of queries that are not padding."""
    mask = inputs.get("attention_mask")
    rows = weights.transpose(1, 2)
    return rows.flatten(0, 1) if mask is None else rows[mask.bool()]


def test_the_list_of_what_works_is_the_list_of_what_is_tested() -> None:
    assert sorted(WORKS.split(", ")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_is_captured_in_order_with_its_shapes(name: str) -> None:
    family, model = model_of(name)
    found = caught(model, inputs_of(family), hidden=True)
    assert [captured.layer for captured in found] == list(range(family.layers))
    for captured in found:
        assert captured.query.shape == (BATCH, family.heads, family.tokens, family.width)
        assert (
            captured.key.shape
            == captured.value.shape
            == (BATCH, family.kv_heads, family.tokens, family.width)
        )
        assert captured.hidden is not None
        assert captured.hidden.shape == (BATCH, family.tokens, 32)
        assert captured.name in dict(model.named_modules())
        assert captured.softcap == (0.5 if "softcap" in family.traits else None)
        assert (captured.bias is not None) == ("bias" in family.traits)
        assert (captured.sinks is not None) == ("sinks" in family.traits)
    assert any(captured.window for captured in found) == ("window" in family.traits)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_weights_by_hand_are_those_of_the_models_own_explicit_attention(
    name: str, padded: bool
) -> None:
    """Mask, scale, soft cap, bias, sinks and shared key heads in one comparison, layer by layer.

    Explicit attention is float32: 1e-5 is fifty roundings of a weight of order one.
    """
    family, model = model_of(name)
    inputs = inputs_of(family, padded=padded)
    reported = eager_weights(model, inputs)
    found = caught(model, inputs)
    assert len(reported) == len(found) == family.layers
    for captured, theirs in zip(found, reported, strict=True):
        ours = weights_by_hand(captured)
        # a test on uniform weights would see no mask, scale or cap
        assert theirs.double().std() > 0.01
        torch.testing.assert_close(
            real_rows(ours, inputs), real_rows(theirs.double(), inputs), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_captured_call_recomputes_its_own_output(name: str) -> None:
    family, model = model_of(name)
    for captured in caught(model, inputs_of(family)):
        groups = captured.heads // captured.kv_heads
        expected = weights_by_hand(captured) @ captured.value.double().repeat_interleave(
            groups, dim=1
        )
        torch.testing.assert_close(captured.output().double(), expected, rtol=0, atol=1e-5)
        at = torch.tensor([8, 0, 3])
        torch.testing.assert_close(
            captured.output(at).double(), expected[:, :, at], rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("name", NAMES)
def test_causality_and_windows_are_in_the_mask(name: str) -> None:
    family, model = model_of(name)
    lower = torch.ones(family.tokens, family.tokens, dtype=torch.bool).tril()
    for captured in caught(model, inputs_of(family)):
        seen = torch.ones_like(lower) if captured.allowed is None else captured.allowed[0, 0]
        near = torch.ones_like(lower)
        # the window counts the token itself, on one side or on both
        if captured.window is not None:
            distance = torch.arange(family.tokens)[:, None] - torch.arange(family.tokens)[None, :]
            near = distance.abs() < captured.window
        assert torch.equal(seen, near & lower if family.causal else near)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_single_queries_give_the_models_own_weights(name: str, padded: bool) -> None:
    """``visible`` and ``bias_at`` of three positions, asked for out of order, against explicit
    attention to 1e-5.
    """
    family, model = model_of(name)
    inputs, at = inputs_of(family, padded=padded), torch.tensor([7, 0, 5])
    found = caught(model, inputs)
    for captured, theirs in zip(found, eager_weights(model, inputs), strict=True):
        key = captured.key.double().repeat_interleave(captured.heads // captured.kv_heads, dim=1)
        scores = captured.scale * captured.query[:, :, at].double() @ key.mT
        if captured.softcap is not None:
            scores = captured.softcap * torch.tanh(scores / captured.softcap)
        bias, visible = captured.bias_at(at), captured.visible(at)
        assert visible.shape in [(BATCH, heads, 3, family.tokens) for heads in (1, family.heads)]
        assert visible.dtype == torch.bool
        assert (bias is None) == (captured.bias is None)
        if bias is not None:
            assert bias.shape in [(BATCH, heads, 3, family.tokens) for heads in (1, family.heads)]
            scores = scores + bias
        weights = torch.exp(scores) * visible
        total = weights.sum(dim=-1, keepdim=True)
        if captured.sinks is not None:
            total = total + torch.exp(captured.sinks.double())[None, :, None, None]
        torch.testing.assert_close(weights / total, theirs[:, :, at].double(), rtol=0, atol=1e-5)


def test_padding_is_in_the_mask() -> None:
    family, model = model_of("bert")
    inputs = inputs_of(family, padded=True)
    for captured in caught(model, inputs):
        assert captured.allowed is not None
        assert torch.equal(captured.allowed[:, 0, 0], inputs["attention_mask"].bool())


def test_a_float_mask_of_the_caller_is_split_into_allowed_and_bias() -> None:
    family, model = model_of("bert")
    inputs = inputs_of(family)
    extra = torch.randn(
        BATCH, 1, family.tokens, family.tokens, generator=torch.Generator().manual_seed(3)
    )
    extra[:, :, :, -1] = torch.finfo(torch.float32).min
    inputs["attention_mask"] = extra
    reported, found = eager_weights(model, inputs), caught(model, inputs)
    for captured, theirs in zip(found, reported, strict=True):
        assert captured.bias is not None
        torch.testing.assert_close(weights_by_hand(captured), theirs.double(), rtol=0, atol=1e-5)


def test_hidden_states_are_what_queries_are_made_of() -> None:
    family, model = model_of("bert")
    for captured in caught(model, inputs_of(family), hidden=True):
        module = model.get_submodule(captured.name)
        assert captured.hidden is not None
        query = (
            module.query(captured.hidden)
            .unflatten(-1, (family.heads, family.width))
            .transpose(1, 2)
        )
        assert torch.equal(query, captured.query)


def state_of(model: Any) -> tuple[Any, ...]:
    configs = capturing._configs(model)
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return (
        [config._attn_implementation_internal for config in configs],
        hooks,
        [p.requires_grad for p in model.parameters()],
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_as_before_also_after_an_exception(name: str) -> None:
    family, model = model_of(name)
    inputs, before = inputs_of(family), state_of(model)
    with torch.no_grad():
        expected = model(**inputs)[0]

    def fail(captured: AttentionCall) -> None:
        raise KeyError("from the sink")

    with (
        pytest.raises(KeyError, match="from the sink"),
        capture(model, fail, hidden=True),
        torch.no_grad(),
    ):
        model(**inputs)
    assert state_of(model) == before
    assert not capturing._CAPTURING
    with capture(model, lambda captured: None) as report, torch.no_grad():
        assert model.config._attn_implementation in (capturing.NAME, capturing.SPELLED)
        model(**inputs)
        model(**inputs)
    assert report.calls == 2 * report.next_layer == 2 * family.layers
    assert report.expected == family.layers
    assert state_of(model) == before
    with torch.no_grad():
        assert torch.equal(model(**inputs)[0], expected)


def test_an_implementation_chosen_before_is_given_back() -> None:
    family, model = model_of("llama")
    model.set_attn_implementation("eager")
    try:
        caught(model, inputs_of(family))
        assert model.config._attn_implementation == "eager"
    finally:
        model.set_attn_implementation("sdpa")


def test_without_a_mask_explicit_attention_is_not_made_causal() -> None:
    """A missing mask means causal to the fused implementation and everything to the explicit one,
    whatever is_causal says.
    """
    family, model = model_of("vit")
    model.set_attn_implementation("eager")
    modules = [module for module in model.modules() if hasattr(module, "is_causal")]
    try:
        for module in modules:
            module.is_causal = True
        with torch.no_grad():
            expected = model(**inputs_of(family))[0]
        assert torch.allclose(
            forward(model, inputs_of(family), lambda captured: None)[0], expected, atol=1e-6
        )
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            other = model(**inputs_of(family))[0]
        assert not torch.allclose(other, expected, atol=1e-2)
        assert torch.allclose(
            forward(model, inputs_of(family), lambda captured: None)[0], other, atol=1e-6
        )
    finally:
        model.set_attn_implementation("sdpa")
        for module in modules:
            module.is_causal = False


@pytest.mark.parametrize("name", ["bert", "t5", "gpt_oss"])
def test_nothing_that_is_shown_asks_for_gradients(name: str) -> None:
    """Position biases and sink logits are parameters of the model, or made of some."""
    family, model = model_of(name)
    found: list[AttentionCall] = []
    with capture(model, found.append, hidden=True):
        model(**inputs_of(family))
    shown = [x for one in found for x in vars(one).values() if isinstance(x, torch.Tensor)]
    assert len(shown) >= 4 * family.layers
    assert not any(x.requires_grad for x in shown)


def test_nothing_is_kept_once_the_sink_returns() -> None:
    family, model = model_of("gpt2")
    alive: list[weakref.ref[torch.Tensor]] = []

    def sink(captured: AttentionCall) -> None:
        gc.collect()
        # what earlier layers showed is gone
        assert [ref for ref in alive if ref() is not None] == []
        alive.extend(
            weakref.ref(x)
            for x in (captured.query, captured.key, captured.value, captured.hidden)
            if x is not None
        )

    forward(model, inputs_of(family), sink, hidden=True)
    assert len(alive) == 4 * family.layers


def test_layers_are_chosen_and_later_ones_are_not_computed() -> None:
    family, model = model_of("modernbert")
    inputs = inputs_of(family)
    ran: list[int] = []
    hooks = [
        layer.register_forward_pre_hook(lambda *_, i=i: ran.append(i))
        for i, layer in enumerate(model.layers)
    ]
    try:
        assert [captured.layer for captured in caught(model, inputs, layers=[2, 0])] == [0, 2]
        assert ran == [0, 1, 2]
        ran.clear()
        assert [captured.layer for captured in caught(model, inputs, layers=[1])] == [1]
        assert ran == [0, 1]
    finally:
        for hook in hooks:
            hook.remove()


def test_forward_gives_the_output_unless_it_was_ended_early() -> None:
    family, model = model_of("bert")
    inputs = inputs_of(family)
    assert forward(model, inputs, lambda captured: None).last_hidden_state.shape == (
        BATCH,
        family.tokens,
        32,
    )
    assert forward(model, inputs, lambda captured: None, layers=[0]) is None


def test_a_sink_may_stop() -> None:
    family, model = model_of("bert")
    seen: list[int] = []

    def stop(captured: AttentionCall) -> None:
        seen.append(captured.layer)
        raise StopForward

    reached = False
    with capture(model, stop), torch.no_grad():
        model(**inputs_of(family))
        reached = True
    assert seen == [0]
    assert not reached
    assert forward(model, inputs_of(family), stop) is None
    assert not capturing._CAPTURING


def test_an_encoder_decoder_is_refused_and_its_encoder_is_not() -> None:
    family = next(family for family in FAMILIES if family.name == "bart")
    for name in ("AutoModel", "AutoModelForSeq2SeqLM"):
        model = build(family.config, family.options, name)
        with pytest.raises(ValueError, match=r"is an encoder-decoder; give model.get_encoder\(\)"):
            caught(model, inputs_of(family))
        assert len(caught(model.get_encoder(), inputs_of(family))) == 3


@pytest.mark.parametrize("name", REFUSED)
def test_models_of_which_nothing_would_be_captured_are_refused(name: str) -> None:
    model = build(*REFUSED[name])
    with pytest.raises(
        ValueError, match=r"(own code|without one softmax).*what works: albert, bert"
    ):
        caught(model, {"input_ids": torch.arange(3, 9)[None]})


@pytest.mark.parametrize(
    ("layers", "message"),
    [([2], r"layers 0 to 1, got \[2\]"), ([-1], r"got \[-1\]"), ([], r"got \[\]")],
)
def test_layers_out_of_range_are_refused(layers: list[int], message: str) -> None:
    family, model = model_of("bert")
    with pytest.raises(ValueError, match=message):
        caught(model, inputs_of(family), layers=layers)


def test_wrong_use_is_refused() -> None:
    family, model = model_of("bert")
    with pytest.raises(ValueError, match="expected a transformers model, got Linear"):
        caught(torch.nn.Linear(2, 2), {})
    with capture(model, print), pytest.raises(ValueError, match="being captured already"):
        caught(model, inputs_of(family))
    model.train()
    try:
        with pytest.raises(ValueError, match=r"training mode; call model.eval\(\) first"):
            caught(model, inputs_of(family))
    finally:
        model.eval()


def test_two_models_are_captured_at_once() -> None:
    (first, bert), (second, gpt2) = model_of("bert"), model_of("gpt2")
    left: list[str] = []
    right: list[str] = []
    with (
        capture(bert, lambda c: left.append(c.name)),
        capture(gpt2, lambda c: right.append(c.name)),
        torch.no_grad(),
    ):
        bert(**inputs_of(first))
        gpt2(**inputs_of(second))
    assert [len(left), len(right)] == [2, 2]
    assert left[0].startswith("encoder")
    assert right[0].startswith("transformer")


def test_hybrid_layers_that_are_no_softmax_attention_are_not_expected() -> None:
    config = transformers.Qwen3Config(num_hidden_layers=3)
    config.layer_types = ["linear_attention", "full_attention", "sliding_attention"]
    assert capturing.expected_layers(_Configured(config)) == 2


class _Configured:
    def __init__(self, config: Any) -> None:
        self.config = config


def test_families_are_a_table_of_different_things() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    assert all(isinstance(family, Family) for family in FAMILIES)
