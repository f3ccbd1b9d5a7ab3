"""Hardmax attention: each query takes the value of its highest-scoring key; ties are averaged."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from esscher.attention.softmax import attention_inputs

__all__ = ["attend_hardmax"]

BLOCK = 1 << 22  # scores held at once
TIE = 1e-12  # scores this close (relative to the largest) are equal: repeated keys differ by rounding only


def attend_hardmax(q: Any, k: Any, v: Any) -> Float[Tensor, "m d_v"]:
    """Mean of the values of the keys with the largest score <q, k_j>, in one streamed pass; scores in float64.

    The limit of softmax attention as its scores are multiplied by a factor that grows without bound. [B, section 5].
    """
    q, k, v, _, _ = attention_inputs(q, k, v, 1.0, None)
    if q.ndim != 2:
        raise ValueError(f"q: expected two axes, got shape {tuple(q.shape)}")
    best = torch.full((q.shape[0],), -torch.inf, dtype=torch.float64, device=q.device)
    total = torch.zeros(q.shape[0], v.shape[1], dtype=torch.float64, device=q.device)
    count = torch.zeros_like(best)
    step = max(1, BLOCK // q.shape[0])
    for start in range(0, k.shape[0], step):
        scores = q.double() @ k[start : start + step].double().T
        top = scores.max(dim=1).values
        slack = TIE * torch.maximum(top.abs(), torch.ones_like(top))
        tied = (scores >= (top - slack)[:, None]).double()
        wins, draws = top > best + slack, (top - best).abs() <= slack
        keep = torch.where(wins, 0.0, 1.0).double()
        take = torch.where(wins | draws, 1.0, 0.0).double()
        total = keep[:, None] * total + take[:, None] * (tied @ v[start : start + step].double())
        count = keep * count + take * tied.sum(dim=1)
        best = torch.maximum(best, top)
    return (total / count[:, None]).to(q.dtype)
