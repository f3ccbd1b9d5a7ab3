"""Tiny models and text for the tests of compression runs."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from esscher.compress.session import Source, source_of
from esscher.compress.spec import CompressSpec
from tests.models.probe_runs import save_tiny, whole_prose
from tests.models.tiny import FAMILIES, build
from tests.models.tokenizers_for_tests import tokenizer

SIZES: dict[str, Any] = {
    "texts": 2,
    "window": 60,
    "decode": 12,
    "observe": 8,
    "keep": [0.2, 0.4, 0.7],
    "draws": 2,
}
RULES = ["sinks:2+random", "sinks:2+recent:4+impact"]
WINDOW = 20  # of the sliding layers of the tiny gemma


@functools.cache
def folder() -> Path:
    """Tiny random models in folders, and a text."""
    made = Path(tempfile.mkdtemp(prefix="esscher-tests-"))
    save_tiny(made / "llama", "llama", "llama", max_position_embeddings=128)
    save_tiny(made / "gpt2", "gpt2", "gpt2", n_positions=128)
    save_tiny(made / "bert", "bert", "llama", max_position_embeddings=128)
    words = tokenizer("llama")
    oss = next(family for family in FAMILIES if family.name == "gpt_oss")
    options = {**oss.options, "vocab_size": len(words), "max_position_embeddings": 128}
    build(oss.config, options, "AutoModelForCausalLM").save_pretrained(made / "gpt_oss")
    words.save_pretrained(made / "gpt_oss")
    gemma = next(family for family in FAMILIES if family.name == "gemma3_text")
    options = {
        **gemma.options,
        "vocab_size": len(words),
        "max_position_embeddings": 128,
        "num_key_value_heads": 1,
        "sliding_window": WINDOW,
    }
    build(gemma.config, options, "AutoModelForCausalLM").save_pretrained(made / "gemma")
    words.save_pretrained(made / "gemma")
    bert = next(family for family in FAMILIES if family.name == "bert")
    options = {
        **bert.options,
        "vocab_size": len(words),
        "max_position_embeddings": 128,
        "num_labels": 3,
    }
    build(bert.config, options, "AutoModelForSequenceClassification").save_pretrained(
        made / "classifier"
    )
    words.save_pretrained(made / "classifier")
    (made / "text.txt").write_text(whole_prose()[:12000], "utf-8")
    return made


def spec(model: str, **settings: Any) -> CompressSpec:
    fields = {
        "model": str(folder() / model),
        "corpus": {"text": [str(folder() / "text.txt")]},
        **SIZES,
        **settings,
    }
    return CompressSpec.read({key: value for key, value in fields.items() if value is not None})


def source(model: str, **settings: Any) -> Source:
    return source_of(spec(model, **settings))
