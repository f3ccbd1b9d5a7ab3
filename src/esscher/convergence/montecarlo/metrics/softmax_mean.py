"""Softmax means of some rows over the keys, for every n of a draw, against a target."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from esscher.attention.state import AttentionState, attention_state, init, merge
from esscher.convergence.montecarlo.draw import Draw
from esscher.convergence.montecarlo.metrics.base import Discrepancy, as_floats

__all__ = ["against", "segments"]


def against(draw: Draw, values: Callable[[Tensor], Tensor], target: Tensor) -> Discrepancy:
    """Mean over queries of |sum_j p_j values(y_j) - target|^2; segments between the n are merged,
    each key seen once.
    """
    head, tokens = draw.plan.head, draw.tokens
    x, target = draw.queries.to(tokens), target.double().to(tokens.device)
    q, k, v = head.queries(x), head.keys(tokens), values(tokens)
    state = init(q, v.shape[1])
    own = (
        AttentionState((q.double() * head.keys(x).double()).sum(1), values(x).double())
        if draw.plan.query_inside
        else None
    )
    squared = []
    for start, stop in segments(draw.ladder):
        state = merge(state, attention_state(q, k[start:stop], v[start:stop], 1.0))
        out = state.out if own is None else merge(state, own).out
        squared.append((out - target).square().sum(1).mean())
    return Discrepancy(as_floats(torch.stack(squared)), float(target.square().sum(1).mean()))


def segments(ladder: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    return zip((0, *ladder[:-1]), ladder, strict=True)
