"""Softmax attention in its plainest form: all scores at once, in float64."""

from __future__ import annotations

import math
from typing import Any

import torch

from esscher.attention.state import attention_inputs


def softmax_attention(q: Any, k: Any, v: Any, scale: Any = None, mask: Any = None) -> torch.Tensor:
    """sum_j p_ij v_j with p_ij ~ exp(scale <q_i, k_j>); ``mask``: true where i may see j."""
    q, k, v, _, mask = attention_inputs(q, k, v, scale, mask)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = scale * (q.double() @ k.double().mT)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(dim=-1) @ v.double()
