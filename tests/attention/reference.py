"""Softmax attention in its plainest form: all scores at once, in float64; and a head on tokens."""

from __future__ import annotations

import math
from typing import Any

import torch

import esscher as es
from esscher.attention.state import attention_inputs


def softmax_attention(q: Any, k: Any, v: Any, scale: Any = None, mask: Any = None) -> torch.Tensor:
    """sum_j p_ij v_j with p_ij ~ exp(scale <q_i, k_j>); ``mask``: true where i may see j."""
    q, k, v, _, mask = attention_inputs(q, k, v, scale, mask)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = scale * (q.double() @ k.double().mT)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(dim=-1) @ v.double()


def attend_tokens(
    head: es.Head,
    queries: torch.Tensor,
    tokens: torch.Tensor,
    *,
    kernel: str = "softmax",
    query_inside: bool = False,
) -> torch.Tensor:
    """Gamma_n(x) for each row x of ``queries``; ``query_inside`` adds x to its own prompt."""
    attend = {
        "softmax": softmax_attention,
        "hardmax": lambda q, k, v, _: es.attend_hardmax(q, k, v),
        "linear": es.attend_linear,
    }[kernel]
    tokens = tokens.to(queries)
    rows = []
    for x in queries[:, None]:
        prompt = torch.cat([tokens, x]) if query_inside else tokens
        rows.append(attend(head.queries(x), head.keys(prompt), head.values(prompt), 1.0))
    return torch.cat(rows).to(queries.dtype)
