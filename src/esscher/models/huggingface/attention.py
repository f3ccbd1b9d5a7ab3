"""Attention of a model as its own code means it: scale, soft cap, position bias, mask and sink logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = ["attend_masked", "causal_mask", "split_mask"]

EXPLICIT_SCORES = 1 << 24  # scores held at once where there is no fused kernel


def causal_mask(queries: int, keys: int, device: torch.device) -> Bool[Tensor, "1 1 queries keys"]:
    """Key j is seen by query i when j <= i."""
    rows = torch.arange(queries, device=device)[:, None]
    return (torch.arange(keys, device=device)[None, :] <= rows)[None, None]


def split_mask(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(allowed, bias) of a mask: boolean masks say who is seen; of float ones the very negative entries forbid, the rest adds.

    Float masks of transformers forbid by the smallest number of their dtype, sums of two of them reach minus infinity.
    """
    if mask is None:
        return None, None
    if mask.dtype == torch.bool:
        return mask, None
    forbidden = mask <= torch.finfo(mask.dtype).min / 2
    rest = mask.masked_fill(forbidden, 0.0)
    if mask.device.type == "meta":
        return ~forbidden, None
    allowed = ~forbidden if bool(forbidden.any()) else None
    return allowed, rest if bool(rest.any()) else None


def attend_masked(
    query: Float[Tensor, "batch heads m k"],
    key: Float[Tensor, "batch kv_heads n k"],
    value: Float[Tensor, "batch kv_heads n v"],
    scale: float,
    *,
    allowed: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Float[Tensor, "batch heads m v"]:
    """sum_j p_j v_j with p_j = exp(s_j) / (exp(sink) + sum_i exp(s_i)) over the allowed keys.

    s_j = cap(scale <q, k_j>) + bias_j, cap(s) = softcap tanh(s / softcap). Several query heads share a key head (GQA): head h
    reads key head h // (heads / kv_heads). A query that may see nothing gets zero.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if softcap is None and sinks is None:
        mask = allowed
        if bias is not None:
            bias = bias.to(query.dtype)
            mask = bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    step = max(1, EXPLICIT_SCORES // max(1, query.shape[0] * query.shape[1] * key.shape[2]))
    blocks = []
    for start in range(0, query.shape[2], step):
        rows = slice(start, start + step)
        scores = scale * (query[:, :, rows] @ key.mT).to(torch.promote_types(query.dtype, torch.float32))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias[:, :, rows]
        if allowed is not None:
            scores = scores.masked_fill(~allowed[:, :, rows], -torch.inf)
        blocks.append(_weights(scores, sinks).to(value.dtype) @ value)
    return torch.cat(blocks, dim=2)


def _weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the keys; sinks are one more logit per head, whose weight is dropped."""
    keys = scores.shape[-1]
    if sinks is not None:
        logits = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, logits], dim=-1)
    dead = scores.amax(dim=-1, keepdim=True) == -torch.inf
    return torch.softmax(scores.masked_fill(dead, 0.0), dim=-1).masked_fill(dead, 0.0)[..., :keys]
