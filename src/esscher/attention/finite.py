"""A head on n tokens: softmax, hardmax or linear, with the query outside the prompt or inside it."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from esscher.attention.hardmax import attend_hardmax
from esscher.attention.head import Head
from esscher.attention.linear import attend_linear
from esscher.attention.streaming import AttentionState, attention_state, finish, merge
from esscher.inputs import as_tensor

__all__ = ["KERNELS", "attend_tokens"]

KERNELS = ("softmax", "hardmax", "linear")


def attend_tokens(
    head: Head, queries: Any, tokens: Any, *, kernel: str = "softmax", query_inside: bool = False
) -> Float[Tensor, "m d_out"]:
    """Gamma_n(x) for each row x of ``queries``: the head's output on the given tokens.

    ``query_inside`` adds the query itself to its prompt, (n mu_n + delta_x) / (n + 1) [S, Remark 3.2]; it needs queries and
    tokens of one dimension.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel: expected one of {', '.join(KERNELS)}, got {kernel!r}")
    x, y = as_tensor(queries, "queries", ndim=2), as_tensor(tokens, "tokens", ndim=2, last=head.dim)
    if query_inside and head.dim_query != head.dim:
        raise ValueError(f"query_inside: expected queries and tokens of one dimension, got {head.dim_query} and {head.dim}")
    y = y.to(x.dtype)
    q, k, v = head.queries(x), head.keys(y), head.values(y)
    if kernel == "hardmax":
        return _hardmax(head, x, q, k, v) if query_inside else attend_hardmax(q, k, v)
    if kernel == "linear":
        out = attend_linear(q, k, v, scale=1.0)
        if not query_inside:
            return out
        n = k.shape[0]
        own_score = (q * head.keys(x)).sum(dim=1, keepdim=True)
        return (n * out + own_score * head.values(x)) / (n + 1)
    state = attention_state(q, k, v, 1.0)
    if query_inside:
        own_score = (q.double() * head.keys(x).double()).sum(dim=1)
        state = merge(state, AttentionState(own_score, head.values(x).double()))
    return finish(state).to(x.dtype)


def _hardmax(head: Head, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Hardmax with the query among its own keys: one prompt per query."""
    rows = [
        attend_hardmax(q[i : i + 1], torch.cat([k, head.keys(x[i : i + 1])]), torch.cat([v, head.values(x[i : i + 1])]))
        for i in range(x.shape[0])
    ]
    return torch.cat(rows)
