"""A head on n tokens: softmax, hardmax or linear, with the query outside the prompt or inside
it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from esscher.attention.head import Head
from esscher.attention.softmax import attention_inputs
from esscher.attention.state import AttentionState, attention_state, finish, merge
from esscher.inputs import as_kind, as_tensor, finite_result
from esscher.measures.matrices import shift, split

BLOCK = 1 << 22  # scores held at once
# scores this close, relative to |q| |k_j|, are equal: repeated keys differ by rounding only
TIE = 1e-12


def attend_hardmax(q: Any, k: Any, v: Any) -> Float[Tensor, "m d_v"]:
    """Mean of the values of the keys with the largest score <q, k_j>, in one streamed pass; scores
    in float64.

    The limit of softmax attention as its scores are multiplied by a factor that grows without
    bound. [B, section 5]. Which key is highest does not change when queries or all keys are scaled,
    so both are brought to size one first.
    """
    q, k, v, _, _ = attention_inputs(q, k, v, 1.0, None)
    if q.ndim != 2:
        raise ValueError(f"q: expected two axes, got shape {tuple(q.shape)}")
    (rows, _), (keys, _) = split(q), split(k, (-2, -1))
    slack = TIE * rows.norm(dim=1)
    best = torch.full((q.shape[0],), -torch.inf, dtype=torch.float64, device=q.device)
    reach = torch.zeros_like(best)  # slack of the best score
    total = torch.zeros(q.shape[0], v.shape[1], dtype=torch.float64, device=q.device)
    count = torch.zeros_like(best)
    step = max(1, BLOCK // q.shape[0])
    for start in range(0, k.shape[0], step):
        block = keys[start : start + step]
        scores, sizes = rows @ block.T, block.norm(dim=1)
        top, at = scores.max(dim=1)
        near = slack * sizes[at]
        tied = (torch.addr(scores, slack, sizes) >= top[:, None]).double()
        close = torch.maximum(near, reach)
        wins, draws = top > best + close, (top - best).abs() <= close
        keep = torch.where(wins, 0.0, 1.0).double()
        take = torch.where(wins | draws, 1.0, 0.0).double()
        total = keep[:, None] * total + take[:, None] * (tied @ v[start : start + step].double())
        count = keep * count + take * tied.sum(dim=1)
        best, reach = torch.maximum(best, top), torch.where(top > best, near, reach)
    return finite_result((total / count[:, None]).to(q.dtype), "attend_hardmax", "scale v down")


# ---- Linear attention normalised by the number of tokens, the model of much in-context-learning
# theory.


def attend_linear(q: Any, k: Any, v: Any, scale: Any = None) -> Float[Tensor, "*batch m d_v"]:
    """(1/n) sum_j scale <q_i, k_j> v_j, in O(n) by forming sum_j k_j v_j^T first; sums in float64.
    [S, B.2].

    Powers of two are taken out of every factor, so that only the output itself can leave the
    floating range; then ValueError.
    """
    q, k, v, scale, _ = attention_inputs(q, k, v, scale, None)
    n, dtype = k.shape[-2], q.dtype
    (q, of_q), (k, of_k), (v, of_v) = split(q), split(k, (-2, -1)), split(v, (-2, -1))
    mantissa, of_scale = math.frexp(scale)
    out = shift(mantissa * (q @ (k.mT @ v / n)), of_q + of_k + of_v + float(of_scale)).to(dtype)
    return finite_result(
        out, "attend_linear", "lower the scale or the size of q, k and v, or use float64"
    )


# ---- A head on n tokens: softmax, hardmax or linear, with the query outside the prompt or inside
# it.

KERNELS = ("softmax", "hardmax", "linear")


def attend_tokens(
    head: Head, queries: Any, tokens: Any, *, kernel: str = "softmax", query_inside: bool = False
) -> Float[Tensor, "m d_out"]:
    """Gamma_n(x) for each row x of ``queries``: the head's output on the given tokens.

    ``query_inside`` adds the query itself to its prompt, (n mu_n + delta_x) / (n + 1) [S, Remark
    3.2]; it needs queries and tokens of one dimension. Computed in float32 or better, answered in
    the dtype of the queries.
    """
    as_kind(head, Head, "head")
    if kernel not in KERNELS:
        raise ValueError(f"kernel: expected one of {', '.join(KERNELS)}, got {kernel!r}")
    x, y = as_tensor(queries, "queries", ndim=2), as_tensor(tokens, "tokens", ndim=2, last=head.dim)
    if query_inside and head.dim_query != head.dim:
        raise ValueError(
            f"query_inside: expected queries and tokens of one dimension, got {head.dim_query} and"
            f" {head.dim}"
        )
    if 0 in (x.shape[0], y.shape[0]):
        raise ValueError(
            f"queries, tokens: expected at least one of each, got {x.shape[0]} and {y.shape[0]}"
        )
    dtype = x.dtype
    common = torch.promote_types(torch.promote_types(dtype, y.dtype), torch.float32)
    x, y = x.to(common), y.to(common)
    q, k, v = head.queries(x), head.keys(y), head.values(y)
    if kernel == "hardmax":
        out = _hardmax(head, x, q, k, v) if query_inside else attend_hardmax(q, k, v)
    elif kernel == "linear":
        out = _linear(head, x, q, k, v) if query_inside else attend_linear(q, k, v, scale=1.0)
    else:
        state = attention_state(q, k, v, 1.0)
        if query_inside:
            own_score = finite_result(
                (q.double() * head.keys(x).double()).sum(dim=1), "scores", "scale the head down"
            )
            state = merge(state, AttentionState(own_score, head.values(x).double()))
        out = finish(state)
    return finite_result(
        out.to(dtype), "attend_tokens", "scale the head or the tokens down, or use float64"
    )


def _linear(head: Head, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = k.shape[0]
    own_score = (q * head.keys(x)).sum(dim=1, keepdim=True)
    return (n * attend_linear(q, k, v, scale=1.0) + own_score * head.values(x)) / (n + 1)


def _hardmax(head: Head, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Hardmax with the query among its own keys: one prompt per query."""
    rows = [
        attend_hardmax(
            q[i : i + 1],
            torch.cat([k, head.keys(x[i : i + 1])]),
            torch.cat([v, head.values(x[i : i + 1])]),
        )
        for i in range(x.shape[0])
    ]
    return torch.cat(rows)
