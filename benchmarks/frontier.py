"""The frontier of a head: exact errors of keep rules at twelve sizes, in fused attention passes
over the same pairs.

The rule for a cache by chances of its own, neyman:shared, is timed apart: at the smallest sizes
many keys are summed one by one.
"""

from __future__ import annotations

import torch
from ratio import best_times, ratio_line
from torch.nn.functional import scaled_dot_product_attention

from esscher.errors.keep_curve import KeepErrors
from esscher.keep import parse
from esscher.keep.context import Context
from esscher.probe.spec import RULES, kept_sizes

QUERIES, KEYS, WIDTH = 64, 4096, 64
CACHE = "neyman:shared"


def main() -> list[str]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(size, WIDTH, generator=generator) for size in (QUERIES, KEYS, KEYS))
    rules = [parse(text) for text in RULES if text != CACHE]

    def dense() -> None:
        scaled_dot_product_attention(q[None, None], k[None, None], v[None, None])

    def frontier() -> None:
        errors = KeepErrors(Context.of(q, k, v))
        sizes = kept_sizes(KEYS)
        for rule in rules:
            errors.curve(rule, sizes[sizes >= rule.least(errors.context)])

    def cache() -> None:
        KeepErrors(Context.of(q, k, v)).curve(parse(CACHE), kept_sizes(KEYS))

    dense_time, frontier_time, cache_time = best_times(dense, frontier, cache, repeats=3)
    sizes = len(kept_sizes(KEYS))
    return [
        ratio_line(
            f"frontier, {len(rules)} rules x {sizes} sizes / fused pass",
            frontier_time / dense_time,
            100,
        ),
        ratio_line(f"frontier, {CACHE} / fused pass", cache_time / dense_time, 60),
    ]
