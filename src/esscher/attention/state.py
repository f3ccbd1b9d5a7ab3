"""Softmax attention over any number of keys in flat memory: a fused kernel for a block of keys, and
a frozen state that carries the sums from block to block.

A state is (lse, out) for each query: lse = log sum_j exp(score_j) and out = sum_j softmax_j v_j
over the keys seen so far. Two states over disjoint keys merge exactly:

    lse = log(exp lse_a + exp lse_b),
    out = (1 - w) out_a + w out_b,
    w = exp(lse_b - lse) = sigmoid(lse_b - lse_a).

The merge is associative and commutative up to rounding. States are float64 whatever the inputs are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float64
from torch import Tensor

from esscher.inputs import as_attention
from esscher.measures.matrices import in_range

EXPLICIT_SCORES = 1 << 22  # scores the explicit path holds at once
KEY_BLOCK = 1 << 16  # keys per block: long sums are carried in float64 between blocks
# scores above it are taken again in float64: float32 rounds them by more than 6e-5, and so the
# weights
LARGE = 1024.0


def attention_inputs(
    q: Any, k: Any, v: Any, scale: Any, mask: Any = None
) -> tuple[Tensor, Tensor, Tensor, float, Tensor | None]:
    """Check what every attention function is given: shapes, finiteness, scale, visible keys."""
    q, k, v, scale = as_attention(q, k, v, scale, heads=True)
    for name, x in (("q", q), ("k", k), ("v", v)):
        in_range(x, name)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v: expected one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if mask is not None:
        mask = _check_mask(mask, (*q.shape[:-1], k.shape[-2]))
    return q, k, v, scale, mask


def _check_mask(mask: Any, shape: tuple[int, ...]) -> Tensor:
    visible = torch.as_tensor(mask)
    if visible.dtype != torch.bool:
        raise ValueError(
            f"mask: expected booleans, true where a query may see a key, got {visible.dtype}"
        )
    try:
        visible = visible.expand(shape)
    except RuntimeError as cause:
        raise ValueError(
            f"mask: expected a shape that broadcasts to {shape}, got {tuple(visible.shape)}"
        ) from cause
    blind = int((~visible.any(dim=-1)).sum())
    if blind:
        raise ValueError(
            f"mask: {blind} queries see no key, so attention is undefined there; leave them out or"
            " unmask a key"
        )
    return visible


# ---- one block of keys


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse): softmax attention over these keys and log sum_j exp(scale <q, k_j> + bias_j), lse
    = -inf where no key is visible.

    ``bias``: added to the scores, or booleans, true where a query may see a key. Half precision is
    raised to float32; scores that float32 cannot hold or hardly resolves are taken in float64.
    """
    if q.dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(~bias, -torch.inf)
    out, lse = _block(q, k, v, scale, bias)
    if q.dtype == torch.float32 and _doubtful(out, lse):
        out, lse = _block(q.double(), k.double(), v.double(), scale, bias)
    return out, lse


def _block(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    bias = None if bias is None else bias.to(q.dtype)
    # the fused kernels do not carry a gradient through lse, and merging blocks needs one
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))):
        if q.device.type == "cpu":
            return _fused(q, k, v, scale, bias)
        if q.device.type == "cuda" and q.dtype == torch.float32 and bias is None:
            return _fused(q, k, v, scale, None)
    return _explicit(q, k, v, scale, bias)


def _doubtful(out: Tensor, lse: Tensor) -> bool:
    """Whether a query has scores out of range; the CPU kernel answers out = 0 and lse = 0 where it
    met NaN or infinity.
    """
    low, high = torch.aminmax(out.detach())
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        return True
    lse = lse.detach()
    right = (lse.abs() < LARGE) & (lse != 0.0) | (lse == -torch.inf)
    return not bool(right.all())


def _fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """PyTorch's fused kernels want four axes and one width for q, k, v, that of CUDA a multiple of
    16; zero columns change nothing. That of the CPU is slow on widths just below a multiple.
    """
    batch, (m, d_v) = q.shape[:-2], (q.shape[-2], v.shape[-1])
    width = max(q.shape[-1], d_v)
    if q.device.type == "cuda" or width < 16 or width % 16 > 8:
        width = -(-width // 16) * 16
    q4, k4, v4 = (_four_axes(x, width) for x in (q, k, v))
    if q.device.type == "cuda":
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
            q4, k4, v4, None, True, 0.0, False, scale=scale
        )[:2]
        lse = lse[..., :m]  # padded to a multiple of 32 rows
    else:
        mask = None if bias is None else bias.reshape(-1, 1, m, k.shape[-2])
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q4, k4, v4, 0.0, False, attn_mask=mask, scale=scale
        )
    out, lse = out[..., :d_v].reshape(*batch, m, d_v), lse.reshape(*batch, m)
    if bias is not None:  # the kernel reports lse = 0 for a row without visible keys
        lse = torch.where((bias > -torch.inf).any(dim=-1), lse, -torch.inf)
    return out, lse


def _four_axes(x: Tensor, width: int) -> Tensor:
    """(batch, 1, rows, width). The kernels read each row as ``width`` neighbouring numbers whatever
    its last stride is.
    """
    if x.shape[-1] < width:  # padding by nothing would still copy
        x = F.pad(x, (0, width - x.shape[-1]))
    x = x.reshape(-1, 1, x.shape[-2], width)
    plain = x.stride(-1) == 1 and x.stride(-2) >= width  # rows may lie apart, not over one another
    return x if plain else x.clone(memory_format=torch.contiguous_format)


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    step = max(1, EXPLICIT_SCORES // max(1, k[..., 0].numel()))
    outs, lses = [], []
    for start in range(0, q.shape[-2], step):
        rows = slice(start, start + step)
        scores = scale * (q[..., rows, :] @ k.mT)
        if bias is not None:
            scores = scores + bias[..., rows, :]
        lse = torch.logsumexp(scores, dim=-1)
        # not exp(scores - lse): beside a large score lse loses the number of keys that share it
        blind = (lse == -torch.inf)[..., None]
        outs.append(scores.masked_fill(blind, 0.0).softmax(dim=-1).masked_fill(blind, 0.0) @ v)
        lses.append(lse)
    return torch.cat(outs, dim=-2), torch.cat(lses, dim=-1)


# ---- any number of keys


@dataclass(frozen=True)
class AttentionState:
    lse: Float64[Tensor, "*batch m"]
    out: Float64[Tensor, "*batch m d_v"]


def init(q: Tensor, d_v: int) -> AttentionState:
    """The state of the queries q before any key."""
    rows = q.shape[:-1]
    lse = torch.full(rows, -torch.inf, dtype=torch.float64, device=q.device)
    return AttentionState(lse, torch.zeros(*rows, d_v, dtype=torch.float64, device=q.device))


def merge(a: AttentionState, b: AttentionState) -> AttentionState:
    """The state over the union of two disjoint sets of keys."""
    weight = torch.sigmoid(b.lse - a.lse)
    weight = weight.nan_to_num(0.0)  # -inf on both sides: neither has seen a key
    return AttentionState(
        torch.logaddexp(a.lse, b.lse), torch.lerp(a.out, b.out, weight[..., None])
    )


def attention_state(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None
) -> AttentionState:
    """The state of checked queries after all keys."""
    state = None
    for start in range(0, k.shape[-2], KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        visible = None if mask is None else mask[..., block]
        out, lse = attend_block(q, k[..., block, :], v[..., block, :], scale, visible)
        new = AttentionState(lse.double(), out.double())
        state = new if state is None else merge(state, new)
    assert state is not None
    return state
