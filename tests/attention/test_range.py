"""Attention at the edges of the floating range: right, or refused; never NaN, infinite or zero
without a word. Random calls of every size are compared with references in ``tests/fuzz``.
"""

from __future__ import annotations

import pytest
import torch

import esscher as es


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check_words(refusal: ValueError) -> None:
    """What left the range, and what to do."""
    text = str(refusal)
    assert "beyond float64" in text or "leave the range of" in text, text
    assert "lower the scale" in text or "down" in text, text


def test_one_overflowing_key_anywhere_is_seen() -> None:
    """The CPU kernel works in blocks of keys: a score beyond float32 in any of them must not pass
    for zero.
    """
    q, k, v = (
        torch.ones(3, 16),
        0.1 * randn(2000, 16, seed=2).float(),
        randn(2000, 16, seed=3).float(),
    )
    for at in (0, 1, 511, 512, 1023, 1999):
        for size in (1e38, -1e38):
            keys = k.clone()
            keys[at] = size
            expected = (
                v[at].expand(3, 16)
                if size > 0
                else es.attend(q.double(), keys.double(), v.double()).float()
            )
            torch.testing.assert_close(
                es.attend(q, keys, v, 1.0 if size > 0 else None), expected, rtol=0, atol=1e-5
            )
            masked = torch.ones(3, 2000, dtype=torch.bool)
            masked[0, at] = False  # the overflow is hidden from the first query
            out = es.attend(q, keys, v, mask=masked)
            torch.testing.assert_close(
                out.double(),
                es.attend(q.double(), keys.double(), v.double(), mask=masked),
                rtol=0,
                atol=1e-5,
            )


def test_large_float32_scores_have_the_weights_of_float64() -> None:
    """float32 resolves a score of 1e5 to 0.008, and the weights with it."""
    q, k, v = (100.0 * randn(11, 16, seed=seed).float() for seed in (1, 2, 3))
    exact = es.attend(q.double(), k.double(), v.double(), 1.0)
    torch.testing.assert_close(es.attend(q, k, v, 1.0).double(), exact, rtol=0, atol=1e-4)


def test_tiny_scores_are_no_ties() -> None:
    q, k, v = 1e-9 * randn(5, 3, seed=1), 1e-9 * randn(17, 3, seed=2), randn(17, 2, seed=3)
    torch.testing.assert_close(
        es.attend_hardmax(q, k, v), es.attend_hardmax(1e9 * q, 1e9 * k, v), rtol=0, atol=0
    )


def test_values_at_the_edge() -> None:
    """Values of 3e38 overflow the float32 kernel's sums, not their mean; a product beyond float16
    is refused.
    """
    q, k = torch.zeros(2, 16), torch.zeros(50, 16)
    torch.testing.assert_close(
        es.attend(q, k, torch.full((50, 16), 3e38)), torch.full((2, 16), 3e38)
    )
    half = torch.full((2, 4), 300.0, dtype=torch.float16)
    with pytest.raises(ValueError, match="leave the range of float16"):
        es.attend_linear(half, half, half)
    for name in ("q", "k", "v"):
        wide = {each: randn(4, 2, seed=1) for each in ("q", "k", "v")}
        wide[name] = 1e120 * wide[name]
        with pytest.raises(ValueError, match=f"{name}: expected numbers of sizes up to 1e100"):
            es.attend(**wide)


def test_prefix_sizes_of_every_kind() -> None:
    q = randn(8, 4, seed=1)
    expected = es.attend_prefixes(q, q, q, [2, 8])[1][0]
    sizes = torch.tensor([2.0, 8.0])
    for kind in (
        sizes.bfloat16(),
        sizes.half(),
        sizes.requires_grad_(),
        list(sizes.detach().bfloat16()),
        sizes.detach().numpy(),
    ):
        assert torch.equal(es.attend_prefixes(q, q, q, kind)[1][0], expected)
    rows = list(q.bfloat16())
    low = es.attend_prefixes(rows, rows, rows, [2, 8])[1][0]
    torch.testing.assert_close(low, es.attend_prefixes(*(3 * [q.bfloat16()]), [2, 8])[1][0])
