"""A description from the configuration says what the loaded model shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from esscher.models.describe import describe_model
from tests.models.tiny import FAMILIES, REFUSED, Family, build, transformers

POSITIONS = {
    "rotary": (
        "modernbert gpt_neox phi olmo2 qwen2 gemma3_text llama qwen3 mistral gemma2 phi3 gpt_oss"
    ),
    "relative bias": "t5",
    "learned": "bert roberta electra albert distilbert gpt2 opt bart dinov2 vit",
}
KIND = {name: kind for kind, names in POSITIONS.items() for name in names.split()}


def configured(family: Family, folder: Path) -> Path:
    """A folder that holds a configuration and nothing else."""
    getattr(transformers, family.config)(**family.options).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_no_weights_are_needed(family: Family, tmp_path: Path) -> None:
    found = describe_model(configured(family, tmp_path), cost=False)
    assert found.supported
    assert found.reason is None
    assert found.family == family.name
    assert (found.layers, found.heads, found.kv_heads, found.width) == (
        family.layers,
        family.heads,
        family.kv_heads,
        family.width,
    )
    assert (found.causal, found.hidden_size) == (family.causal, 32)
    assert found.positions == KIND[family.name]
    assert found.softcap == (0.5 if "softcap" in family.traits else None)
    assert found.sinks == ("sinks" in family.traits)
    assert len(found.windows) == family.layers
    assert any(found.windows) == ("window" in family.traits)
    assert found.encoder_of_pair == (family.name in ("t5", "bart"))
    assert found.cost is None


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_parameters_are_counted(name: str, tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    model = build(family.config, family.options)
    assert describe_model(configured(family, tmp_path), cost=False).parameters == sum(
        p.numel() for p in model.parameters()
    )


@pytest.mark.parametrize("name", REFUSED)
def test_the_reason_of_a_refusal_is_given(name: str, tmp_path: Path) -> None:
    config, options = REFUSED[name]
    getattr(transformers, config)(**options).save_pretrained(tmp_path)
    found = describe_model(tmp_path)
    assert not found.supported
    assert found.reason is not None
    assert "what works: albert, bert" in found.reason
    assert found.parameters > 0
    assert found.heads is None
    assert found.cost is None


def test_cost_grows_with_the_model(tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == "llama")
    small = describe_model(configured(family, tmp_path / "small")).cost
    big = transformers.LlamaConfig(
        **{**family.options, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    )
    big.save_pretrained(tmp_path / "big")
    large = describe_model(tmp_path / "big").cost
    assert small is not None
    assert large is not None
    # windows of all that it takes
    assert (small.tokens, small.keys, small.queries) == (16_384, 64, 256)
    assert 0 < small.forward_seconds < small.seconds
    # numbers of operations, since the measured speeds differ from one moment to the next
    assert large.forward_seconds * large.matmul > 100 * small.forward_seconds * small.matmul
    assert large.bytes > small.bytes


def test_queries_meet_the_text_of_an_encoder_and_the_window_of_a_causal_model(
    tmp_path: Path,
) -> None:
    """As a default probe has it, and pairs as many as these: time is forward passes and a multiple
    of the pairs.
    """
    pairs = {}
    for name in ("bert", "llama"):
        family = next(family for family in FAMILIES if family.name == name)
        options = {**family.options, "max_position_embeddings": 4096}
        getattr(transformers, family.config)(**options).save_pretrained(tmp_path / name)
        cost = describe_model(tmp_path / name).cost
        assert cost is not None
        assert (cost.tokens, cost.keys) == (16_384, 16_384 if name == "bert" else 2048)
        pairs[name] = (cost.seconds - cost.forward_seconds) * cost.fused
    assert pairs["bert"] / pairs["llama"] == pytest.approx(8)


def test_a_configuration_that_builds_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "bert", "hidden_size": 30, "num_attention_heads": 4}'
    )
    with pytest.raises(ValueError, match="no model can be built from this configuration") as caught:
        describe_model(tmp_path)
    assert "\n" not in str(caught.value)
