"""Linear attention normalised by the number of tokens, the model of much in-context-learning
theory.
"""

from __future__ import annotations

import math
from typing import Any

from jaxtyping import Float
from torch import Tensor

from esscher.attention.softmax import attention_inputs
from esscher.inputs import finite_result
from esscher.measures.matrices import shift, split

__all__ = ["attend_linear"]


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
