"""exact_pool_curve: its time over that of fused attention on the same pairs, and what a curve of more points adds."""

from __future__ import annotations

import numpy as np
import torch
from ratio import best_times, ratio_line

from esscher.convergence.pool_error import exact_pool_curve

QUERIES, KEYS, WIDTH = 512, 8192, 32


def main() -> list[str]:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(QUERIES, WIDTH, generator=generator)
    k, v = (torch.randn(KEYS, WIDTH, generator=generator) for _ in range(2))
    n = np.unique(np.logspace(0, np.log10(KEYS), 44).round()).astype(int)
    assert len(n) == 40
    four = [x[None, None] for x in (q, k, v)]
    drawn, kept, double, fused = best_times(
        lambda: exact_pool_curve(q, k, v, n),
        lambda: exact_pool_curve(q, k, v, n, "bernoulli"),
        lambda: exact_pool_curve(q.double(), k.double(), v.double(), n),
        lambda: [torch.nn.functional.scaled_dot_product_attention(*four) for _ in range(10)],
        repeats=9,
    )
    fused /= 10
    return [
        ratio_line("pool curve, 40 n, 512 x 8192 / fused attention", drawn / fused, 40.0),
        ratio_line("  the same in float64", double / fused, 120.0),
        ratio_line("  the same, keys kept (bernoulli)", kept / fused, 200.0),
    ]


if __name__ == "__main__":
    print("\n".join(main()))
