"""Tiny random models of many families: one table that the tests on models run over."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

TOKENS, BATCH, VOCABULARY = 13, 2, 61


@dataclass(frozen=True)
class Family:
    """How to build one family small, and what its heads look like; sizes differ so that no two axes
    can be confused.
    """

    name: str
    config: str
    options: dict[str, Any]
    model: str = "AutoModel"
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    width: int = 8
    causal: bool = True
    tokens: int = TOKENS
    affine: bool = False  # q, k and v are affine in what enters the module, whatever the position
    traits: frozenset[str] = field(default_factory=frozenset)


USUAL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
ENCODER = {**USUAL, "pad_token_id": 0}
GROUPED = {
    **USUAL,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES = (
    Family("bert", "BertConfig", ENCODER, causal=False, affine=True),
    Family(
        "roberta",
        "RobertaConfig",
        {**ENCODER, "bos_token_id": 1, "eos_token_id": 2},
        causal=False,
        affine=True,
    ),
    Family(
        "electra", "ElectraConfig", {**ENCODER, "embedding_size": 16}, causal=False, affine=True
    ),
    Family("albert", "AlbertConfig", {**ENCODER, "embedding_size": 16}, causal=False, affine=True),
    Family(
        "distilbert",
        "DistilBertConfig",
        {
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 37,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 64,
        },
        causal=False,
        affine=True,
    ),
    Family(
        "modernbert",
        "ModernBertConfig",
        {
            **ENCODER,
            "num_hidden_layers": 4,
            "global_attn_every_n_layers": 3,
            "local_attention": 6,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        layers=4,
        causal=False,
        traits=frozenset({"window"}),
    ),
    Family(
        "gpt2",
        "GPT2Config",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": VOCABULARY,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 1,
        },
        model="AutoModelForCausalLM",
        affine=True,
    ),
    Family(
        "gpt_neox",
        "GPTNeoXConfig",
        {**USUAL, "bos_token_id": 1, "eos_token_id": 2},
        model="AutoModelForCausalLM",
    ),
    Family("phi", "PhiConfig", {**USUAL, "bos_token_id": 1, "eos_token_id": 2}),
    Family("olmo2", "Olmo2Config", GROUPED, kv_heads=2),
    Family(
        "qwen2",
        "Qwen2Config",
        {key: value for key, value in GROUPED.items() if key != "head_dim"},
        kv_heads=2,
    ),
    Family(
        "gemma3_text",
        "Gemma3TextConfig",
        {
            **GROUPED,
            "num_hidden_layers": 3,
            "sliding_window": 5,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        },
        layers=3,
        kv_heads=2,
        traits=frozenset({"window"}),
    ),
    Family("llama", "LlamaConfig", GROUPED, model="AutoModelForCausalLM", kv_heads=2),
    Family("qwen3", "Qwen3Config", GROUPED, model="AutoModelForCausalLM", kv_heads=2),
    Family(
        "mistral",
        "MistralConfig",
        {**GROUPED, "sliding_window": 5},
        kv_heads=2,
        traits=frozenset({"window"}),
    ),
    Family(
        "gemma2",
        "Gemma2Config",
        {
            **GROUPED,
            "query_pre_attn_scalar": 11,
            "attn_logit_softcapping": 0.5,
            "sliding_window": 5,
        },
        model="AutoModelForCausalLM",
        kv_heads=2,
        traits=frozenset({"window", "softcap"}),
    ),
    Family("phi3", "Phi3Config", GROUPED, model="AutoModelForCausalLM", kv_heads=2),
    Family(
        "opt",
        "OPTConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 37,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
            "pad_token_id": 0,
        },
        affine=True,
    ),
    Family(
        "t5",
        "T5Config",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 37,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": VOCABULARY,
            "pad_token_id": 0,
            "relative_attention_num_buckets": 8,
        },
        model="T5EncoderModel",
        causal=False,
        affine=True,
        traits=frozenset({"bias"}),
    ),
    Family(
        "bart",
        "BartConfig",
        {
            "d_model": 32,
            "encoder_layers": 3,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 37,
            "decoder_ffn_dim": 37,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": 2,
        },
        layers=3,
        causal=False,
        affine=True,
        traits=frozenset({"encoder"}),
    ),
    Family(
        "dinov2",
        "Dinov2Config",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "mlp_ratio": 2,
            "image_size": 12,
            "patch_size": 4,
        },
        causal=False,
        tokens=10,
        affine=True,
        traits=frozenset({"image"}),
    ),
    Family(
        "vit",
        "ViTConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 37,
            "image_size": 12,
            "patch_size": 4,
        },
        causal=False,
        tokens=10,
        affine=True,
        traits=frozenset({"image"}),
    ),
    Family(
        "gpt_oss",
        "GptOssConfig",
        {
            **GROUPED,
            "intermediate_size": 36,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "sliding_window": 5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        kv_heads=2,
        traits=frozenset({"window", "sinks"}),
    ),
)

REFUSED = {
    "bloom": (
        "BloomConfig",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY},
    ),
    "falcon": (
        "FalconConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": VOCABULARY,
        },
    ),
    "mamba": (
        "MambaConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "state_size": 4},
    ),
    "gptj": (
        "GPTJConfig",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": VOCABULARY},
    ),
    "gpt_neo": (
        "GPTNeoConfig",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": VOCABULARY,
            "attention_types": [[["global"], 2]],
        },
    ),
    "codegen": (
        "CodeGenConfig",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": VOCABULARY},
    ),
    "mpt": ("MptConfig", {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": VOCABULARY}),
}


def build(config: str, options: dict[str, Any], model: str = "AutoModel", **more: Any) -> Any:
    """A random model with weights large enough that attention is far from uniform and biases are
    not zero.
    """
    torch.manual_seed(7)
    made = getattr(transformers, config)(**options, **more)
    auto = getattr(transformers, model)
    network = (auto.from_config(made) if model.startswith("Auto") else auto(made)).eval().float()
    state = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=state), alpha=0.15)
    return network


@functools.cache
def model_of(name: str) -> tuple[Family, Any]:
    """The family and its model, built once a session: tests leave models as they found them."""
    family = next(family for family in FAMILIES if family.name == name)
    model = build(family.config, family.options, family.model)
    return family, model.get_encoder() if "encoder" in family.traits else model


def inputs_of(family: Family, *, padded: bool = False) -> dict[str, torch.Tensor]:
    """Two sequences (or images) of random content; padded ones end early, as tokenizers pad."""
    state = torch.Generator().manual_seed(5)
    if "image" in family.traits:
        return {"pixel_values": torch.randn(BATCH, 3, 12, 12, generator=state)}
    ids = torch.randint(3, VOCABULARY, (BATCH, family.tokens), generator=state)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, -4:] = 0
        ids[1, -4:] = 0
    return {"input_ids": ids, "attention_mask": mask}
