"""Attention does not depend on how its inputs lie in memory. The kernels read rows as neighbours
whatever their stride.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import esscher as es
from esscher.attention.state import attend_block
from tests.attention.reference import softmax_attention


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).to(dtype)


def strided(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, dim=-1)[..., ::2]


def heads_last(x: torch.Tensor) -> torch.Tensor:
    """As captured from a model: (head, token, width) seen through a (token, head, width) block."""
    return torch.stack([x, x], dim=-2).movedim(-2, 0)[0]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.mT.contiguous().mT,
    "strided": strided,
    "sliced": lambda x: torch.cat([x, x, x], dim=-1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "every other row": lambda x: x.repeat_interleave(2, dim=-2)[..., ::2, :],
    "heads last": heads_last,
}


# below, at and between multiples of the kernel's 16
@pytest.mark.parametrize("width", [1, 5, 16, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_attend_is_the_same_for_every_layout(name: str, dtype: torch.dtype, width: int) -> None:
    q, k, v = (randn(n, width, seed=n, dtype=dtype) for n in (7, 23, 23))
    mask = randn(7, 23, seed=3) < 1.0
    exact = softmax_attention(q, k, v)
    tolerance = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
    layout = LAYOUTS[name]
    for case in (
        (layout(q), k, v),
        (q, layout(k), v),
        (q, k, layout(v)),
        (layout(q), layout(k), layout(v)),
    ):
        torch.testing.assert_close(es.attend(*case).double(), exact, rtol=0, atol=tolerance)
    masked = es.attend(layout(q), layout(k), layout(v), mask=layout(mask)).double()
    torch.testing.assert_close(
        masked, softmax_attention(q, k, v, mask=mask), rtol=0, atol=tolerance
    )


@pytest.mark.parametrize("shared", ["rows", "columns", "batches"])
def test_numbers_that_share_memory(shared: str) -> None:
    """Expanded tensors have stride zero; windows of one long sequence lie over one another."""
    q, v = randn(2, 7, 64, seed=1), randn(2, 23, 64, seed=2)
    k = {
        "rows": randn(2, 1, 64, seed=3).expand(2, 23, 64),
        "columns": randn(2, 23, 1, seed=3).expand(2, 23, 64),
        "batches": randn(1, 23, 64, seed=3).expand(2, 23, 64),
    }[shared]
    torch.testing.assert_close(es.attend(q, k, v), softmax_attention(q, k, v), rtol=0, atol=1e-13)
    windows = randn(90, seed=4).unfold(0, 64, 1)[:23].expand(2, 23, 64)
    torch.testing.assert_close(
        es.attend(q, windows, v), softmax_attention(q, windows, v), rtol=0, atol=1e-13
    )
    # a single row counts as contiguous whatever its strides are
    one = randn(64, 2, seed=5).T[:1].expand(2, 1, 64)
    torch.testing.assert_close(es.attend(q, one, one), one.expand(2, 7, 64), rtol=0, atol=1e-13)


def test_prefixes_and_log_sums_are_the_same_for_every_layout() -> None:
    q, k, v = (randn(32, 64, seed=seed) for seed in (1, 2, 3))
    _, lse = attend_block(q, k, v, 0.125)
    torch.testing.assert_close(lse, torch.logsumexp(0.125 * q @ k.T, dim=1), rtol=1e-13, atol=1e-13)
    for layout in LAYOUTS.values():
        mean, _ = es.attend_prefixes(layout(q), layout(k), layout(v), [8, 32])[1]
        torch.testing.assert_close(mean, softmax_attention(q, k, v).mean(0), rtol=0, atol=1e-13)
        torch.testing.assert_close(
            attend_block(layout(q), layout(k), layout(v), 0.125)[1], lse, rtol=1e-13, atol=1e-13
        )
