"""Linear attention normalised by the number of tokens, the model of much in-context-learning theory."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from esscher.attention.softmax import attention_inputs

__all__ = ["attend_linear"]


def attend_linear(q: Any, k: Any, v: Any, scale: Any = None) -> Float[Tensor, "*batch m d_v"]:
    """(1/n) sum_j scale <q_i, k_j> v_j, in O(n) by forming sum_j k_j v_j^T first; sums in float64. [S, B.2]."""
    q, k, v, scale, _ = attention_inputs(q, k, v, scale, None)
    memory = k.double().mT @ v.double() / k.shape[-2]
    out: Tensor = (scale * (q.double() @ memory)).to(q.dtype)
    return out
