"""One block of softmax attention together with its log-sum-exp: the fused kernel where there is one, else explicit."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["attend_block"]

EXPLICIT_SCORES = 1 << 22  # scores the explicit path holds at once


def attend_block(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse): softmax attention over these keys and log sum_j exp(scale <q, k_j>), lse = -inf where no key is visible.

    Half precision is raised to float32 first, so nothing is ever summed in half precision.
    """
    if q.dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    # the fused kernels do not carry a gradient through lse, and merging blocks needs one
    differentiable = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if not differentiable and q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64):
        return _fused(q, k, v, scale, mask)
    if not differentiable and q.device.type == "cuda" and q.dtype == torch.float32 and mask is None:
        return _fused(q, k, v, scale, None)
    return _explicit(q, k, v, scale, mask)


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """PyTorch's fused kernels want four axes and one width for q, k, v; zero columns change nothing."""
    batch, (m, d_v) = q.shape[:-2], (q.shape[-2], v.shape[-1])
    width = -(-max(q.shape[-1], d_v) // 16) * 16
    q4, k4, v4 = (_four_axes(x, width) for x in (q, k, v))
    if q.device.type == "cuda":
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(q4, k4, v4, None, True, 0.0, False, scale=scale)[:2]
        lse = lse[..., :m]  # padded to a multiple of 32 rows
    else:
        bias = None
        if mask is not None:
            bias = torch.zeros((), dtype=q.dtype).masked_fill(~mask, -torch.inf).reshape(-1, 1, m, k.shape[-2])
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q4, k4, v4, 0.0, False, attn_mask=bias, scale=scale
        )
    out, lse = out[..., :d_v].reshape(*batch, m, d_v), lse.reshape(*batch, m)
    if mask is not None:  # the kernel reports lse = 0 for a row without visible keys
        lse = torch.where(mask.any(dim=-1), lse, -torch.inf)
    return out, lse


def _four_axes(x: Tensor, width: int) -> Tensor:
    if x.shape[-1] < width:  # padding by nothing would still copy
        x = F.pad(x, (0, width - x.shape[-1]))
    return x.reshape(-1, 1, x.shape[-2], width)


def _explicit(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    step = max(1, EXPLICIT_SCORES // max(1, k[..., 0].numel()))
    outs, lses = [], []
    for start in range(0, q.shape[-2], step):
        rows = slice(start, start + step)
        scores = scale * (q[..., rows, :] @ k.mT)
        if mask is not None:
            scores = scores.masked_fill(~mask[..., rows, :], -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        shift = lse.masked_fill(lse == -torch.inf, 0.0)
        outs.append(torch.exp(scores - shift[..., None]) @ v)
        lses.append(lse)
    return torch.cat(outs, dim=-2), torch.cat(lses, dim=-1)
