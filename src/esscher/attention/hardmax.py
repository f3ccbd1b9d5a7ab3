"""Hardmax attention: each query takes the value of its highest-scoring key; ties are averaged."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from esscher.attention.softmax import attention_inputs
from esscher.inputs import finite_result
from esscher.measures.matrices import split

__all__ = ["attend_hardmax"]

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
