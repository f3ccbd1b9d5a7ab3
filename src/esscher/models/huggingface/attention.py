"""Attention of a model as its own code means it: scale, soft cap, position bias, mask and sink
logits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from esscher.models.huggingface.masks import Mask

__all__ = ["attend_masked", "split_mask"]

EXPLICIT_SCORES = 1 << 22  # scores held at once where there is no fused kernel
ROWS = 256  # queries that meet their keys at once where a mask is more than causal
# keys and values of one width up to this have a fused kernel that shares key heads
FUSED_WIDTH = 256


def split_mask(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(allowed, bias) of a mask: boolean masks say who is seen; of float ones the very negative
    entries forbid, the rest adds.

    Float masks of transformers forbid by the smallest number of their dtype, sums of two of them
    reach minus infinity.
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
    mask: Mask | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Float[Tensor, "batch heads m v"]:
    """sum_j p_j v_j with p_j = exp(s_j) / (exp(sink) + sum_i exp(s_i)) over the keys that are seen.

    s_j = cap(scale <q, k_j>) + bias_j, cap(s) = softcap tanh(s / softcap). Several query heads
    share a key head (GQA): head h reads key head h // (heads / kv_heads). A query that may see
    nothing gets zero.

    Without a mask, or with a causal one, this is one fused call. Else queries go in blocks, which
    meet the keys from the first to the last that one of them sees: a sliding window costs tokens x
    window, and no mask or score of all pairs is held.
    """
    shared = query.shape[1] > key.shape[1]
    explicit = softcap is not None or sinks is not None
    if (
        not explicit
        and bias is None
        and (mask is None or mask.causal)
        and key.shape[-1] == value.shape[-1] <= FUSED_WIDTH
    ):
        causal = mask is not None and query.shape[2] > 1
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=scale, enable_gqa=shared
        )
    if shared:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    most = max(1, EXPLICIT_SCORES // max(1, query.shape[0] * query.shape[1] * key.shape[2]))
    step = most if explicit or key.shape[-1] != value.shape[-1] else ROWS
    blocks = []
    for start in range(0, query.shape[2], step):
        stop = min(start + step, query.shape[2])
        reach, allowed = (slice(0, key.shape[2]), None) if mask is None else mask.block(start, stop)
        added = (
            None
            if bias is None
            else bias.expand(-1, -1, query.shape[2], key.shape[2])[:, :, start:stop, reach]
        )
        q, k, v = query[:, :, start:stop], key[:, :, reach], value[:, :, reach]
        if explicit:
            blocks.append(_weights(q, k, scale, allowed, added, softcap, sinks) @ v)
        else:
            blocks.append(
                F.scaled_dot_product_attention(
                    q, k, v, attn_mask=_additive(allowed, added, q.dtype), scale=scale
                )
            )
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def _additive(allowed: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Mask and bias as fused attention takes them: one boolean or one added tensor."""
    if bias is None:
        return allowed
    return bias.to(dtype) if allowed is None else bias.to(dtype).masked_fill(~allowed, -torch.inf)


def _weights(
    query: Tensor,
    key: Tensor,
    scale: float,
    allowed: Tensor | None,
    bias: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Softmax over the keys; sinks are one more logit per head, whose weight is dropped."""
    scores = scale * (query @ key.mT).to(torch.promote_types(query.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        logits = (
            sinks.to(scores.dtype)
            .reshape(1, -1, 1, 1)
            .expand(scores.shape[0], -1, scores.shape[2], 1)
        )
        scores = torch.cat([scores, logits], dim=-1)
    dead = scores.amax(dim=-1, keepdim=True) == -torch.inf
    weights = torch.softmax(scores.masked_fill(dead, 0.0), dim=-1).masked_fill(dead, 0.0)
    return weights[..., : key.shape[2]].to(query.dtype)
