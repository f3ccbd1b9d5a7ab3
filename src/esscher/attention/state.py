"""Softmax attention over any number of keys in flat memory: init, update, merge, finish on a frozen
state.

A state is (lse, out) for each query: lse = log sum_j exp(score_j) and out = sum_j softmax_j v_j
over the keys seen so far. Two states over disjoint keys merge exactly:

    lse = log(exp lse_a + exp lse_b),
    out = (1 - w) out_a + w out_b,
    w = exp(lse_b - lse) = sigmoid(lse_b - lse_a).

The merge is associative and commutative up to rounding. States are float64 whatever the inputs are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float64
from torch import Tensor

from esscher.measures.matrices import wide_scores

EXPLICIT_SCORES = 1 << 22  # scores the explicit path holds at once
# scores above it are taken again in float64: float32 rounds them by more than 6e-5, and so the
# weights
LARGE = 1024.0


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse): softmax attention over these keys and log sum_j exp(scale <q, k_j>), lse = -inf
    where no key is visible.

    Half precision is raised to float32 first, so nothing is ever summed in half precision. Blocks
    with scores that float32 cannot hold or hardly resolves are computed in float64; ValueError for
    scores beyond float64.
    """
    if q.dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    visible = None if mask is None else mask.any(dim=-1)
    out, lse = _plain(q, k, v, scale, mask)
    if q.dtype == torch.float32:
        if not _doubtful(out, lse, visible, LARGE):
            return out, lse
        q, k, v = q.double(), k.double(), v.double()
        out, lse = _plain(q, k, v, scale, mask)
    if _doubtful(out, lse, visible, torch.inf):
        out, lse = _explicit(q.double(), k.double(), v.double(), scale, mask, wide=True)
        _refuse_overflow(out, lse, visible)
    return out, lse


def _plain(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    # the fused kernels do not carry a gradient through lse, and merging blocks needs one
    differentiable = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad
    )
    if not differentiable and q.device.type == "cpu":
        return _fused(q, k, v, scale, mask)
    if not differentiable and q.device.type == "cuda" and q.dtype == torch.float32 and mask is None:
        return _fused(q, k, v, scale, None)
    return _explicit(q, k, v, scale, mask)


def _doubtful(out: Tensor, lse: Tensor, visible: Tensor | None, large: float) -> bool:
    """Whether a query has scores out of range; the CPU kernel answers out = 0 and lse = 0 where it
    met NaN or infinity.
    """
    low, high = torch.aminmax(out.detach())
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        return True
    right = (lse.detach().abs() < large) & (lse.detach() != 0.0)
    return not bool((right if visible is None else right | ~visible).all())


def _refuse_overflow(out: Tensor, lse: Tensor, visible: Tensor | None) -> None:
    bad = ~lse.isfinite() if visible is None else ~lse.isfinite() & visible
    if bool(bad.any()):
        raise ValueError(
            f"attention: the scores scale <q, k> of {int(bad.sum())} of {bad.numel()} queries are"
            " beyond float64 (1.8e308); lower the scale or the size of q and k"
        )
    if not bool(out.isfinite().all()):
        raise ValueError("attention: sums of the values are beyond float64 (1.8e308); scale v down")


def _fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """PyTorch's fused kernels want four axes and one width for q, k, v; zero columns change
    nothing.
    """
    batch, (m, d_v) = q.shape[:-2], (q.shape[-2], v.shape[-1])
    width = -(-max(q.shape[-1], d_v) // 16) * 16
    q4, k4, v4 = (_four_axes(x, width) for x in (q, k, v))
    if q.device.type == "cuda":
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
            q4, k4, v4, None, True, 0.0, False, scale=scale
        )[:2]
        lse = lse[..., :m]  # padded to a multiple of 32 rows
    else:
        bias = None
        if mask is not None:
            bias = (
                torch.zeros((), dtype=q.dtype)
                .masked_fill(~mask, -torch.inf)
                .reshape(-1, 1, m, k.shape[-2])
            )
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q4, k4, v4, 0.0, False, attn_mask=bias, scale=scale
        )
    out, lse = out[..., :d_v].reshape(*batch, m, d_v), lse.reshape(*batch, m)
    if mask is not None:  # the kernel reports lse = 0 for a row without visible keys
        lse = torch.where(mask.any(dim=-1), lse, -torch.inf)
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
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, wide: bool = False
) -> tuple[Tensor, Tensor]:
    step = max(1, EXPLICIT_SCORES // max(1, k[..., 0].numel()))
    outs, lses = [], []
    for start in range(0, q.shape[-2], step):
        rows = q[..., start : start + step, :]
        scores = wide_scores(rows, k, scale) if wide else scale * (rows @ k.mT)
        if mask is not None:
            scores = scores.masked_fill(~mask[..., start : start + step, :], -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        # not exp(scores - lse): beside a large score lse loses the number of keys that share it
        blind = (lse == -torch.inf)[..., None]
        outs.append(scores.masked_fill(blind, 0.0).softmax(dim=-1).masked_fill(blind, 0.0) @ v)
        lses.append(lse)
    return torch.cat(outs, dim=-2), torch.cat(lses, dim=-1)


# ---- Softmax attention over any number of keys in flat memory: init, update, merge, finish on a
# frozen state.

KEY_BLOCK = 1 << 16  # keys per block: long sums are carried in float64 between blocks


@dataclass(frozen=True)
class AttentionState:
    lse: Float64[Tensor, "*batch m"]
    out: Float64[Tensor, "*batch m d_v"]


def init(q: Tensor, d_v: int) -> AttentionState:
    """The state of the queries q before any key."""
    rows = q.shape[:-1]
    lse = torch.full(rows, -torch.inf, dtype=torch.float64, device=q.device)
    return AttentionState(lse, torch.zeros(*rows, d_v, dtype=torch.float64, device=q.device))


def update(
    state: AttentionState, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None
) -> AttentionState:
    """The state after one more block of keys; ``mask`` is true where a query may see a key of the
    block.
    """
    return merge(state, _block_state(q, k, v, scale, mask))


def merge(a: AttentionState, b: AttentionState) -> AttentionState:
    """The state over the union of two disjoint sets of keys."""
    weight = torch.sigmoid(b.lse - a.lse)
    weight = weight.nan_to_num(0.0)  # -inf on both sides: neither has seen a key
    return AttentionState(
        torch.logaddexp(a.lse, b.lse), torch.lerp(a.out, b.out, weight[..., None])
    )


def finish(state: AttentionState) -> Float64[Tensor, "*batch m d_v"]:
    """The outputs; every query must have seen a key."""
    blind = int((state.lse == -torch.inf).sum())
    if blind:
        raise ValueError(
            f"attention: {blind} queries have seen no key; update the state with visible keys first"
        )
    return state.out


def attention_state(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None
) -> AttentionState:
    """The state of checked queries after all keys."""
    if k.shape[-2] <= KEY_BLOCK:
        return _block_state(q, k, v, scale, mask)
    state = init(q, v.shape[-1])
    for start in range(0, k.shape[-2], KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        visible = None if mask is None else mask[..., block]
        state = update(state, q, k[..., block, :], v[..., block, :], scale, visible)
    return state


def _block_state(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None
) -> AttentionState:
    out, lse = attend_block(q, k, v, scale, mask)
    return AttentionState(lse.double(), out.double())
