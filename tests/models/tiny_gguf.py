"""Tiny models written as GGUF files with the package gguf: what llama.cpp's converters do, for the
tests of reading them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.tiny import build
from tests.models.tokenizers_for_tests import tokenizer

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

VOCABULARY = 700  # words of the larger tokenizer
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
Change = Callable[[str, np.ndarray, Any], np.ndarray]


def as_they_are(name: str, weights: np.ndarray, config: Any) -> np.ndarray:
    return weights


def pairs_together(name: str, weights: np.ndarray, config: Any) -> np.ndarray:
    """llama: the two coordinates that a rotation turns lie d/2 apart here and beside each other in
    the file.
    """
    if ".self_attn.q_proj" not in name and ".self_attn.k_proj" not in name:
        return weights
    heads = config.num_attention_heads if ".q_proj" in name else config.num_key_value_heads
    width = len(weights) // heads
    rows = [
        head * width + half * (width // 2) + j
        for head in range(heads)
        for j in range(width // 2)
        for half in (0, 1)
    ]
    return weights[rows]


def norms_plus_one(name: str, weights: np.ndarray, config: Any) -> np.ndarray:
    """gemma: a norm multiplies by 1 + w here, by w in the file."""
    return weights + 1 if name.endswith("norm.weight") else weights


def transposed(name: str, weights: np.ndarray, config: Any) -> np.ndarray:
    """gpt2: (in, out) here, (out, in) in the file."""
    matrices = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    return weights.T if name.endswith(matrices) else weights


@dataclass(frozen=True)
class Written:
    """An architecture of GGUF: the transformers configuration of the same model, and what changes
    on the way to the file.
    """

    architecture: str
    config: str
    options: dict[str, Any] = field(default_factory=lambda: COMMON)
    change: Change = as_they_are


WRITTEN = {
    "llama": Written("llama", "LlamaConfig", {**COMMON, "head_dim": 16}, pairs_together),
    "qwen2": Written("qwen2", "Qwen2Config"),
    "qwen3": Written("qwen3", "Qwen3Config", {**COMMON, "head_dim": 128}),
    "gemma2": Written(
        "gemma2", "Gemma2Config", {**COMMON, "head_dim": 256, "sliding_window": 7}, norms_plus_one
    ),
    "gemma3": Written(
        "gemma3",
        "Gemma3TextConfig",
        {**COMMON, "head_dim": 256, "sliding_window": 7},
        norms_plus_one,
    ),
    "gpt2": Written(
        "gpt2",
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        transposed,
    ),
}


def model_of(name: str) -> Any:
    """The model in transformers, without its output head."""
    # some configurations change what they are given
    return build(WRITTEN[name].config, copy.deepcopy(WRITTEN[name].options))


def write_gguf(
    path: Path,
    name: str,
    model: Any,
    kind: str = "F32",
    *,
    words: str | None = "gpt2",
    settings: Any = None,
    more: Any = None,
) -> Path:
    """The model as a GGUF file; matrices of this type, vectors in float32.

    ``settings`` are added, or left out where None, those with ! under their whole name; ``more``
    are other tensors.
    """
    written = WRITTEN[name]
    writer = gguf.GGUFWriter(path, written.architecture)
    for key, value in {**_settings(model.config), **(settings or {})}.items():
        _add(writer, key[1:] if key.startswith("!") else f"{written.architecture}.{key}", value)
    if words is not None:
        _add_words(writer, words)
    names = gguf.get_tensor_name_map(
        next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == written.architecture),
        2,
    )
    for key, tensor in model.state_dict().items():
        weights = np.ascontiguousarray(
            written.change(f".{key}", tensor.double().numpy(), model.config), dtype=np.float32
        )
        place = names.get_name(f"model.{key}", (".weight", ".bias")) or names.get_name(
            key, (".weight", ".bias")
        )
        assert place is not None, key
        plain = weights.ndim == 1 or kind == "F32"
        form = gguf.GGMLQuantizationType.F32 if plain else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(
            place, weights if plain else gguf.quants.quantize(weights, form), raw_dtype=form
        )
    for place, weights in (more or {}).items():
        writer.add_tensor(place, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _settings(config: Any) -> dict[str, Any]:
    """What converters write of a configuration."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "vocab_size": config.vocab_size,
    }
    if config.model_type != "gpt2":
        found["attention.head_count_kv"] = config.num_key_value_heads
        found |= {
            "attention.key_length": width,
            "attention.value_length": width,
            "rope.dimension_count": width,
        }
        found["rope.freq_base"] = float(rope["rope_theta"])
    if hasattr(config, "rms_norm_eps"):
        found["attention.layer_norm_rms_epsilon"] = float(config.rms_norm_eps)
    else:
        found["attention.layer_norm_epsilon"] = float(config.layer_norm_epsilon)
    if getattr(config, "sliding_window", None):
        found["attention.sliding_window"] = config.sliding_window
    if getattr(config, "attn_logit_softcapping", None):
        found["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
    return found


def _add(writer: Any, key: str, value: Any) -> None:
    if value is None:
        return
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    add[type(value)](key, value)


def _add_words(writer: Any, kind: str) -> None:
    """A small tokenizer in the words of GGUF: gpt2 is bytes and merges, llama pieces whose scores
    are the order of merges.
    """
    words = tokenizer(kind)
    ids = sorted(words.get_vocab().items(), key=lambda pair: pair[1])
    special = set(words.all_special_tokens)
    writer.add_tokenizer_model(kind)
    writer.add_token_list([word for word, _ in ids])
    writer.add_token_types([3 if word in special else 1 for word, _ in ids])
    if kind == "gpt2":
        content = json.loads(words.backend_tokenizer.to_str())["model"]
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges([" ".join(pair) for pair in content["merges"]])
        writer.add_pad_token_id(words.eos_token_id)
    else:
        writer.add_token_scores([-float(number) for _, number in ids])
        writer.add_unk_token_id(words.unk_token_id)
    writer.add_bos_token_id(words.bos_token_id)
    writer.add_eos_token_id(words.eos_token_id)
