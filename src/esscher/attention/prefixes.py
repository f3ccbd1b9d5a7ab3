"""Self-attention on nested prefixes of a sequence: every size from one pass over the largest size's
pairs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64
from torch import Tensor

from esscher.attention.softmax import attention_inputs
from esscher.attention.state import attention_state, init, merge
from esscher.inputs import as_counts, finite_result

__all__ = ["PrefixOutputs", "attend_prefixes"]


@dataclass(frozen=True)
class PrefixOutputs:
    """Outputs of self-attention on the first n tokens: their mean, their covariance (divided by n),
    themselves on request.
    """

    n: int
    mean: Float64[Tensor, " d_v"]
    cov: Float64[Tensor, "d_v d_v"]
    outputs: Float64[Tensor, "n d_v"] | None = None


def attend_prefixes(
    q: Any, k: Any, v: Any, sizes: Any, scale: Any = None, *, outputs: bool = False
) -> list[PrefixOutputs]:
    """Statistics of self-attention on the first n_1 < n_2 < ... < n_m tokens, for every size.

    All queries meet the keys segment by segment, keys n_{i-1} .. n_i in one block; after segment i
    the states of the first n_i queries are those of the prefix. Each of the n_m^2 pairs is visited
    once, where one attention per size visits sum_i n_i^2.
    """
    q, k, v, scale, _ = attention_inputs(q, k, v, scale, None)
    if q.ndim != 2 or q.shape[0] != k.shape[0]:
        raise ValueError(
            f"q, k: expected one query for each key, got shapes {tuple(q.shape)} and"
            f" {tuple(k.shape)}"
        )
    ladder = as_counts(sizes, "sizes")
    if bool((np.diff(ladder) <= 0).any()) or ladder[-1] > k.shape[0]:
        raise ValueError(
            f"sizes: expected increasing numbers up to the {k.shape[0]} tokens given, got"
            f" {ladder.tolist()}"
        )
    largest = int(ladder[-1])
    state = init(q[:largest], v.shape[1])
    result = []
    for old, new in itertools.pairwise([0, *ladder.tolist()]):
        state = merge(state, attention_state(q[:largest], k[old:new], v[old:new], scale))
        known = state.out[:new]
        mean = finite_result(known.mean(dim=0), "attend_prefixes", "scale v down")
        centred = known - mean
        cov = finite_result(
            centred.T @ centred / new, "attend_prefixes: the covariance", "scale v down"
        )
        result.append(PrefixOutputs(new, mean, cov, known.clone() if outputs else None))
    return result
