"""exact_pool_curve on 512 x 8192 pairs: its time over that of one fused attention pass on the same
pairs.
"""

from __future__ import annotations

import numpy as np
import torch
from ratio import best_times, ratio_line

from esscher.errors.pool_curve import exact_pool_curve

QUERIES, KEYS, WIDTH = 512, 8192, 32


def main() -> list[str]:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(QUERIES, WIDTH, generator=generator)
    k, v = (torch.randn(KEYS, WIDTH, generator=generator) for _ in range(2))
    n = np.unique(np.logspace(0, np.log10(KEYS), 44).round()).astype(int)
    assert len(n) == 40
    double = [x.double() for x in (q, k, v)]
    four = [x[None, None] for x in (q, k, v)]

    def passes(sampling: str, *tensors: torch.Tensor, repeats: int) -> float:
        curve, fused = best_times(
            lambda: exact_pool_curve(*tensors, n, sampling),
            lambda: torch.nn.functional.scaled_dot_product_attention(*four),
            repeats=repeats,
        )
        return curve / fused

    return [
        ratio_line(
            "pool curve, 40 n, float32 / fused attention pass",
            passes("replacement", q, k, v, repeats=31),
            12.0,
        ),
        ratio_line("  in float64", passes("replacement", *double, repeats=15), 20.0),
        ratio_line("  keys kept (bernoulli)", passes("bernoulli", q, k, v, repeats=5), 40.0),
    ]


if __name__ == "__main__":
    print("\n".join(main()))
