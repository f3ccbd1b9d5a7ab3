"""A head on n tokens: softmax, hardmax or linear, with the query outside the prompt or inside
it.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from esscher.attention.hardmax import attend_hardmax
from esscher.attention.head import Head
from esscher.attention.linear import attend_linear
from esscher.attention.state import AttentionState, attention_state, finish, merge
from esscher.inputs import as_kind, as_tensor, finite_result

__all__ = ["KERNELS", "attend_tokens"]

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
