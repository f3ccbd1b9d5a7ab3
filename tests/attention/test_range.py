"""Attention at the edges of the floating range: right, or refused; never NaN, infinite or zero
without a word.
"""

from __future__ import annotations

from collections.abc import Callable

import mpmath
import pytest
import torch

import esscher as es

SIZES = [1e-98, 1e-30, 1.0, 1e10, 1e30, 1e98]


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def many_digits(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, kernel: str
) -> tuple[list[list[mpmath.mpf]], bool]:
    """Outputs in 60 digits, and whether every score is within float64."""
    rows, held = [], True
    with mpmath.workdps(60):
        for query in q.double().tolist():
            scores = [
                mpmath.mpf(scale)
                * mpmath.fsum(
                    mpmath.mpf(a) * mpmath.mpf(b) for a, b in zip(query, key, strict=True)
                )
                for key in k.double().tolist()
            ]
            held = held and max(abs(s) for s in scores) < mpmath.mpf(torch.finfo(torch.float64).max)
            top = max(scores)
            weights = {
                "softmax": [mpmath.exp(s - top) for s in scores],
                "hardmax": [mpmath.mpf(s == top) for s in scores],
                "linear": scores,
            }[kernel]
            total = len(scores) if kernel == "linear" else mpmath.fsum(weights)
            rows.append(
                [
                    mpmath.fsum(w * y for w, y in zip(weights, column, strict=True)) / total
                    for column in v.double().T.tolist()
                ]
            )
    return rows, held


def right(out: torch.Tensor, exact: list[list[mpmath.mpf]], tolerance: float) -> bool:
    """Within the tolerance relative to the largest entry of each row."""
    for row, reference in zip(out.double().tolist(), exact, strict=True):
        largest = max(abs(x) for x in reference)
        floor = (
            mpmath.mpf(2) ** -1074 / torch.finfo(torch.float64).eps + torch.finfo(out.dtype).tiny
        )
        if any(
            not mpmath.isfinite(a) or abs(a - b) > tolerance * largest + floor
            for a, b in zip(row, reference, strict=True)
        ):
            return False
    return True


def check_words(refusal: ValueError) -> None:
    """What left the range, and what to do."""
    text = str(refusal)
    assert "beyond float64" in text or "leave the range of" in text, text
    assert "lower the scale" in text or "down" in text, text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("differentiable", [False, True])
def test_softmax_of_any_size_is_right_or_refused(dtype: torch.dtype, differentiable: bool) -> None:
    """All sizes of q, k and the scale."""
    answered = 0
    q, k, v = randn(2, 3, seed=1), randn(5, 3, seed=2), randn(5, 2, seed=3)
    v = v.to(dtype)
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for of_q in SIZES:
        for of_k in SIZES:
            a, b = (of_q * q).to(dtype), (of_k * k).to(dtype)
            if not bool(a.isfinite().all() & b.isfinite().all()):
                continue
            for scale in SIZES:
                exact, held = many_digits(a, b, v, scale, "softmax")
                a.requires_grad_(differentiable)
                try:
                    out = es.attend(a, b, v, scale)
                except ValueError as refusal:  # a size rounded to 0 or beyond the dtype
                    assert not held, (of_q, of_k, scale)
                    check_words(refusal)
                else:
                    answered += 1
                    assert right(out.detach(), exact, tolerance), (of_q, of_k, scale, out, exact)
    assert answered > 50


@pytest.mark.parametrize("kernel", ["hardmax", "linear"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_hardmax_and_linear_of_any_size_are_right_or_refused(
    kernel: str, dtype: torch.dtype
) -> None:
    q, k, v = randn(2, 3, seed=1), randn(5, 3, seed=2), randn(5, 2, seed=3)
    largest = torch.finfo(dtype).max
    for of_q in SIZES:
        for of_k in SIZES:
            for of_v in (1e-98, 1.0, 1e98):
                a, b, c = (of_q * q).to(dtype), (of_k * k).to(dtype), (of_v * v).to(dtype)
                if not all(bool(x.isfinite().all()) for x in (a, b, c)):
                    continue
                for scale in [1.0] if kernel == "hardmax" else [1e-10, 1.0, 1e10]:
                    exact, _ = many_digits(a, b, c, scale, kernel)
                    held = all(abs(x) < largest for row in exact for x in row)
                    attention: Callable[..., torch.Tensor] = (
                        es.attend_hardmax if kernel == "hardmax" else es.attend_linear
                    )
                    try:
                        out = (
                            attention(a, b, c) if kernel == "hardmax" else attention(a, b, c, scale)
                        )
                    except ValueError as refusal:
                        assert not held, (of_q, of_k, of_v, scale)
                        check_words(refusal)
                    else:
                        assert held
                        assert right(out, exact, 1e-6 if dtype == torch.float32 else 1e-12), (
                            of_q,
                            of_k,
                            of_v,
                            scale,
                        )


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


@pytest.mark.parametrize("kernel", ["softmax", "hardmax", "linear"])
@pytest.mark.parametrize("inside", [False, True])
def test_heads_on_tokens_are_right_or_refused(kernel: str, inside: bool) -> None:
    """A head of huge weights in float16 queries: float64's answer, or a refusal that says what to
    do.
    """
    x, y = randn(3, 4, seed=1), randn(9, 4, seed=2)
    for size in (1e-3, 1.0, 1e3, 1e6, 1e98):
        head = es.Head(size * randn(4, 4, seed=3), randn(2, 4, seed=4))
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            low, tokens = x.to(dtype), y.to(dtype)
            exact = None
            try:
                exact = es.attend_tokens(
                    head, low.double(), tokens.double(), kernel=kernel, query_inside=inside
                )
                out = es.attend_tokens(head, low, tokens, kernel=kernel, query_inside=inside)
            except ValueError as refusal:
                check_words(refusal)
                held = exact is not None and float(exact.abs().max()) < 0.9 * torch.finfo(dtype).max
                assert not held or size > 1e36
            else:
                torch.testing.assert_close(
                    out.double(), exact, rtol=2e-2 if dtype != torch.float32 else 1e-4, atol=1e-2
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
    expected = es.attend_prefixes(q, q, q, [2, 8])[1].mean
    sizes = torch.tensor([2.0, 8.0])
    for kind in (
        sizes.bfloat16(),
        sizes.half(),
        sizes.requires_grad_(),
        list(sizes.detach().bfloat16()),
        sizes.detach().numpy(),
    ):
        assert torch.equal(es.attend_prefixes(q, q, q, kind)[1].mean, expected)
    rows = list(q.bfloat16())
    low = es.attend_prefixes(rows, rows, rows, [2, 8])[1].mean
    torch.testing.assert_close(low, es.attend_prefixes(*(3 * [q.bfloat16()]), [2, 8])[1].mean)
