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
from jaxtyping import Float64
from torch import Tensor

from esscher.attention.fused import attend_block

__all__ = ["AttentionState", "attention_state", "finish", "init", "merge", "update"]

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
