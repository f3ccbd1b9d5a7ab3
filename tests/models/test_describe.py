"""A description from the configuration says what the loaded model shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from esscher.describe import OF_RULE, Cost, describe
from esscher.probe.spec import RULES, ProbeSpec
from tests.models.tiny import FAMILIES, REFUSED, Family, build, transformers


def configured(family: Family, folder: Path) -> Path:
    """A folder that holds a configuration and nothing else."""
    getattr(transformers, family.config)(**family.options).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_no_weights_are_needed(family: Family, tmp_path: Path) -> None:
    found = describe(configured(family, tmp_path), cost=False)
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
    assert found.cost is None


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_parameters_are_counted(name: str, tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    model = build(family.config, family.options)
    assert describe(configured(family, tmp_path), cost=False).parameters == sum(
        p.numel() for p in model.parameters()
    )


@pytest.mark.parametrize("name", REFUSED)
def test_the_reason_of_a_refusal_is_given(name: str, tmp_path: Path) -> None:
    config, options = REFUSED[name]
    getattr(transformers, config)(**options).save_pretrained(tmp_path)
    found = describe(tmp_path)
    assert not found.supported
    assert found.reason is not None
    assert "what works: albert, bert" in found.reason
    assert found.parameters > 0
    assert found.heads is None
    assert found.cost is None


def saved(name: str, folder: Path, **options: Any) -> Path:
    family = next(family for family in FAMILIES if family.name == name)
    getattr(transformers, family.config)(**{**family.options, **options}).save_pretrained(folder)
    return folder


def priced(folder: Path, **settings: Any) -> Cost:
    corpus = {"max_tokens": settings.pop("max_tokens", 16_384)}
    cost = describe(folder, asked=ProbeSpec.read({**settings, "corpus": corpus})).cost
    assert cost is not None
    return cost


def test_cost_grows_with_the_model(tmp_path: Path) -> None:
    small = priced(saved("llama", tmp_path / "small"))
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    large = priced(saved("llama", tmp_path / "big", **sizes))
    # windows of all that it takes
    assert (small.tokens, small.keys, small.queries) == (16_384, 64, 256)
    assert large.operations["forward"] > 100 * small.operations["forward"]
    assert large.bytes > small.bytes


def test_every_stage_of_a_probe_is_counted(tmp_path: Path) -> None:
    """32 windows at most hold the queries of a causal model, and kept_queries / queries of them
    compare rules, for which a language model is also asked for gradients of 8 draws at 64 places.
    """
    head = {"architectures": ["LlamaForCausalLM"]}
    folder = saved("llama", tmp_path / "llama", max_position_embeddings=4096, **head)
    heads = 2 * 4
    cost = priced(folder, max_tokens=16_384, queries=64, kept_queries=16)
    assert (cost.tokens, cost.keys) == (16_384, 2048)
    windows, ruled, stages = 8, 2, cost.operations
    assert min(stages.values()) > 0
    assert cost.seconds == pytest.approx(sum(stages.values()) / cost.speed)
    token = stages["forward"] / ((windows + ruled) * 2048)
    assert stages["gradients"] == pytest.approx(2 * token * ruled * 64 * 8)
    assert stages["rules"] == pytest.approx(OF_RULE * heads * ruled * 2048 * len(RULES))
    asked = {"max_tokens": 16_384, "queries": 64, "kept_queries": 16}
    bare = priced(folder, rules="none", layers=(0,), **asked).operations
    assert bare["gradients"] == bare["rules"] == 0
    assert bare["forward"] == pytest.approx(token * windows * 1024)
    for name in ("heads", "tables"):
        assert bare[name] == pytest.approx(stages[name] / 2)
    corpus = priced(folder, pool="corpus", **asked)
    assert corpus.keys == 16_384
    half = priced(folder, pool="corpus", **{**asked, "max_tokens": 8192})
    assert half.operations["heads"] == pytest.approx(corpus.operations["heads"] / 2)


def test_a_corpus_in_parts_takes_no_more_memory_than_a_part(tmp_path: Path) -> None:
    for name, pool in (("bert", "corpus"), ("llama", "auto")):
        folder = saved(name, tmp_path / name, max_position_embeddings=512)
        asked = {"part": 4096, "queries": 16, "kept_queries": 4, "pool": pool}
        sizes = [
            priced(folder, max_tokens=tokens, **asked).bytes for tokens in (8192, 10**6, 20_000_000)
        ]
        assert len(set(sizes)) == 1
        assert sizes[0] < 4e9


def test_a_configuration_that_builds_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "bert", "hidden_size": 30, "num_attention_heads": 4}'
    )
    with pytest.raises(ValueError, match="no model can be built from this configuration") as caught:
        describe(tmp_path)
    assert "\n" not in str(caught.value)
