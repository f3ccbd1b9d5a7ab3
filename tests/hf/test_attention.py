"""Attention with all its extras against loops over single numbers."""

from __future__ import annotations

import importlib
import math

import pytest
import torch

from esscher.hf.call import AttentionCall, split_mask

masked = importlib.import_module("esscher.hf.call")


def by_loops(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    allowed: torch.Tensor | None,
    bias: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    batch, heads, m, _ = query.shape
    groups = heads // key.shape[1]
    out = torch.zeros(batch, heads, m, value.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(m):
                total = 0.0 if sinks is None else math.exp(float(sinks[h]))
                for j in range(key.shape[2]):
                    if allowed is not None and not allowed.expand(batch, heads, -1, -1)[b, h, i, j]:
                        continue
                    score = scale * float(query[b, h, i].double() @ key[b, h // groups, j].double())
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                    if bias is not None:
                        score += float(bias.expand(batch, heads, -1, -1)[b, h, i, j])
                    weight = math.exp(score)
                    total += weight
                    out[b, h, i] += weight * value[b, h // groups, j].double()
                out[b, h, i] /= total or 1.0
    return out


@pytest.mark.parametrize("block", [1, 1 << 24])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_every_combination_agrees_with_loops(
    block: int,
    kv_heads: int,
    with_mask: bool,
    with_bias: bool,
    softcap: float | None,
    with_sinks: bool,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(masked, "EXPLICIT_SCORES", block)
    monkeypatch.setattr(masked, "ROWS", block)
    batch, heads, m, n = 2, 6, 3, 5
    query = torch.randn(batch, heads, m, 7, generator=generator, dtype=torch.float64)
    key = torch.randn(batch, kv_heads, n, 7, generator=generator, dtype=torch.float64)
    value = torch.randn(batch, kv_heads, n, 4, generator=generator, dtype=torch.float64)
    allowed = torch.rand(batch, 1, m, n, generator=generator) < 0.6 if with_mask else None
    bias = (
        torch.randn(1, heads, m, n, generator=generator, dtype=torch.float64) if with_bias else None
    )
    sinks = torch.randn(heads, generator=generator, dtype=torch.float64) if with_sinks else None
    mask = allowed
    out = AttentionCall(0, "", query, key, value, 0.6, mask, bias, softcap, sinks).output()
    expected = by_loops(query, key, value, 0.6, allowed, bias, softcap, sinks)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_query_that_sees_nothing_gets_zero(softcap: float | None, with_bias: bool) -> None:
    query = torch.ones(1, 2, 3, 4)
    allowed = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    allowed[..., 0, 0] = False
    bias = torch.ones(1, 2, 3, 3) if with_bias else None
    mask = allowed
    out = AttentionCall(0, "", query, query, query, 0.5, mask, bias, softcap).output()
    assert torch.equal(out[:, :, 0], torch.zeros(1, 2, 4))
    torch.testing.assert_close(out[:, :, 1:], torch.ones(1, 2, 2, 4))


def test_masks_are_split() -> None:
    smallest = torch.finfo(torch.float32).min
    boolean = torch.tensor([True, False])
    assert split_mask(boolean)[0] is boolean
    allowed, bias = split_mask(torch.tensor([0.0, smallest, -torch.inf, 0.0]))
    assert allowed is not None
    assert allowed.tolist() == [True, False, False, True]
    assert bias is None
    allowed, bias = split_mask(torch.tensor([-1.5, 0.0]))
    assert allowed is None
    assert bias is not None
    assert bias.tolist() == [-1.5, 0.0]
