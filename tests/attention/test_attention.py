"""Attention on n tokens: streaming, fused, prefixes, hardmax, linear, each against the plain
float64 reference.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import esscher as es
from esscher.attention import state as states
from esscher.attention.state import attention_state, init, merge
from tests.attention.reference import softmax_attention


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).to(dtype)


def qkv(
    dtype: torch.dtype = torch.float64, size: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        size * randn(13, 7, seed=1, dtype=dtype),
        randn(53, 7, seed=2, dtype=dtype),
        randn(53, 5, seed=3, dtype=dtype),
    )


TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("path", ["fused", "explicit"])
@pytest.mark.parametrize("masked", [False, True])
def test_attend_equals_the_reference(
    dtype: torch.dtype, path: str, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "explicit":
        monkeypatch.setattr(states, "_fused", states._explicit)
        monkeypatch.setattr(states, "EXPLICIT_SCORES", 53 * 4)
    monkeypatch.setattr(states, "KEY_BLOCK", 11)
    q, k, v = qkv(dtype)
    mask = torch.rand(13, 53, generator=torch.Generator().manual_seed(4)) < 0.3 if masked else None
    if mask is not None:
        mask[:, :11] = False  # the first block is invisible to everyone
        mask[:, 30] = True
    out = es.attend(q, k, v, mask=mask)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(),
        softmax_attention(q, k, v, mask=mask),
        rtol=TOLERANCE[dtype],
        atol=TOLERANCE[dtype],
    )


def test_reference_is_what_it_says() -> None:
    """Two keys by hand: weights 1/(1+e^-x)."""
    out = softmax_attention([[2.0]], [[0.0], [1.5]], [[1.0], [5.0]], scale=1.0)
    assert out.item() == pytest.approx(1.0 + 4.0 / (1.0 + math.exp(-3.0)))
    assert softmax_attention(
        [[2.0, 0.0]], [[0.0, 0.0], [1.5, 0.0]], [[1.0], [5.0]]
    ).item() == pytest.approx(1.0 + 4.0 / (1.0 + math.exp(-3.0 / math.sqrt(2))))


def test_half_precision_never_sums_in_half_precision() -> None:
    """70,000 equal keys: a float16 denominator would overflow at 65,504."""
    for dtype in (torch.float16, torch.bfloat16):
        q, k, v = (
            torch.zeros(1, 2, dtype=dtype),
            torch.zeros(70_000, 2, dtype=dtype),
            torch.ones(70_000, 3, dtype=dtype),
        )
        torch.testing.assert_close(
            es.attend(q, k, v), torch.ones(1, 3, dtype=dtype), rtol=0, atol=0
        )


def test_huge_scores_do_not_overflow() -> None:
    q, k, v = qkv(size=1e5)
    torch.testing.assert_close(es.attend(q, k, v), softmax_attention(q, k, v), rtol=1e-9, atol=1e-9)
    q32, k32, v32 = qkv(torch.float32, size=1e5)
    assert bool(torch.isfinite(es.attend(q32, k32, v32)).all())


@given(st.lists(st.integers(1, 52), max_size=6), st.permutations(range(4)))
def test_merge_is_exact_and_associative(cuts: list[int], order: list[int]) -> None:
    """Any split of the keys, merged in any order and any bracketing, gives the same state."""
    q, k, v = qkv()
    whole = attention_state(q, k, v, 0.4)
    edges = sorted({0, 53, *cuts})
    parts = [attention_state(q, k[a:b], v[a:b], 0.4) for a, b in itertools.pairwise(edges)]
    parts = sorted(parts, key=lambda part: order[int(part.lse.sum()) % 4])
    left = init(q, 5)
    for part in parts:
        left = merge(left, part)
    right = init(q, 5)
    for part in reversed(parts):
        right = merge(part, right)
    for state in (left, right):
        torch.testing.assert_close(state.lse, whole.lse, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(state.out, whole.out, rtol=1e-12, atol=1e-12)


def test_a_state_that_has_seen_no_key_changes_nothing() -> None:
    q, k, v = qkv()
    state, seen = init(q, 5), attention_state(q, k, v, 1.0)
    torch.testing.assert_close(merge(state, state).out, state.out)
    torch.testing.assert_close(merge(state, seen).out, seen.out, rtol=0, atol=0)
    blocked = attention_state(q, k, v, 1.0, torch.zeros(13, 53, dtype=torch.bool))
    assert bool((merge(state, blocked).lse == -torch.inf).all())


def test_gradients_flow_through_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernel's log-sum-exp carries no gradient; merging blocks needs it."""
    monkeypatch.setattr(states, "KEY_BLOCK", 11)
    q, k, v = (x.requires_grad_(True) for x in qkv())
    ours = torch.autograd.grad(es.attend(q, k, v).square().sum(), (q, k, v))
    theirs = torch.autograd.grad(softmax_attention(q, k, v).square().sum(), (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_batches_and_wide_values() -> None:
    q, k, v = randn(2, 3, 5, 7), randn(2, 3, 11, 7, seed=1), randn(2, 3, 11, 19, seed=2)
    torch.testing.assert_close(
        es.attend(q, k, v), softmax_attention(q, k, v), rtol=1e-13, atol=1e-13
    )


@pytest.mark.parametrize("attention", [es.attend, softmax_attention])
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"q": torch.zeros(13, 6).double()}, "one width"),
        ({"v": torch.zeros(52, 5).double()}, "one value for each key"),
        ({"k": torch.zeros(0, 7).double(), "v": torch.zeros(0, 5).double()}, "at least one row"),
        (
            {"q": torch.zeros(13, 0).double(), "k": torch.zeros(53, 0).double()},
            "at least one number",
        ),
        ({"q": torch.full((13, 7), torch.nan).double()}, "q: expected finite"),
        ({"v": torch.full((53, 5), torch.inf).double()}, "v: expected finite"),
        ({"k": torch.zeros(53, 7, dtype=torch.int64)}, "k: expected floating"),
        ({"q": torch.zeros(13, 7)}, "one dtype"),
        ({"scale": 0.0}, "scale"),
        ({"scale": float("nan")}, "scale"),
        ({"mask": torch.zeros(13, 53)}, "mask: expected booleans"),
        ({"mask": torch.zeros(12, 53, dtype=torch.bool)}, "broadcasts"),
        ({"mask": torch.arange(13)[:, None].expand(13, 53) > 2}, "3 queries see no key"),
    ],
)
def test_bad_input_is_refused(attention: object, change: dict[str, object], word: str) -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match=word):
        attention(**({"q": q, "k": k, "v": v} | change))  # type: ignore[operator]


# ---- prefixes
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_prefixes_equal_one_attention_per_size(dtype: torch.dtype, tolerance: float) -> None:
    q, k, v = (
        randn(97, 5, dtype=dtype),
        randn(97, 5, seed=1, dtype=dtype),
        randn(97, 3, seed=2, dtype=dtype),
    )
    sizes = [1, 2, 13, 14, 61, 97]
    for n, (mean, cov) in zip(sizes, es.attend_prefixes(q, k, v, sizes), strict=True):
        expected = softmax_attention(q[:n], k[:n], v[:n])
        torch.testing.assert_close(mean, expected.mean(0), rtol=tolerance, atol=tolerance)
        spread = torch.cov(expected.T, correction=0) if n > 1 else torch.zeros(3, 3).double()
        torch.testing.assert_close(cov, spread, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sizes", [[5, 5], [7, 5], [98], [0, 3], [2.5], []])
def test_bad_sizes_are_refused(sizes: list[float]) -> None:
    x = randn(97, 5)
    with pytest.raises(ValueError, match="sizes: expected"):
        es.attend_prefixes(x, x, x, sizes)


def test_prefixes_want_a_query_for_each_key() -> None:
    with pytest.raises(ValueError, match="one query for each key"):
        es.attend_prefixes(randn(5, 3), randn(7, 3), randn(7, 3), [5])


# ---- hardmax and linear
# ------------------------------------------------------------------------------------------


def test_hardmax_is_softmax_without_temperature_and_averages_ties(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = qkv()
    torch.testing.assert_close(
        es.attend_hardmax(q, k, v), softmax_attention(q, k, v, scale=1e9), rtol=1e-9, atol=1e-9
    )
    repeated, values = torch.cat([k, k]), torch.cat([v, v + 2.0])
    for block in (1 << 22, 13 * 8):
        monkeypatch.setattr("esscher.attention.finite.BLOCK", block)
        torch.testing.assert_close(
            es.attend_hardmax(q, repeated, values), es.attend_hardmax(q, k, v) + 1.0
        )
    torch.testing.assert_close(
        es.attend_hardmax(torch.zeros(1, 7).double(), k, v), v.mean(0, keepdim=True)
    )


def test_linear_attention_is_its_double_sum() -> None:
    q, k, v = qkv()
    expected = torch.stack(
        [sum(0.7 * (q[i] @ k[j]) * v[j] for j in range(53)) / 53 for i in range(13)]
    )
    torch.testing.assert_close(es.attend_linear(q, k, v, scale=0.7), expected)


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("size", [1.0, 1e9, 1e36, 1e100])
def test_tied_keys_share_their_weight_whatever_the_score(size: float, needs_grad: bool) -> None:
    """Three equal keys: the mean of their values. exp(score - lse) gave their sum, since lse loses
    log 3 beside 1e17.
    """
    q = torch.full((2, 5), size, dtype=torch.float64, requires_grad=needs_grad)
    v = torch.tensor([[1.0], [2.0], [6.0]], dtype=torch.float64)
    out = es.attend(q, torch.ones(3, 5, dtype=torch.float64), v)
    torch.testing.assert_close(out, torch.full_like(out, 3.0))
