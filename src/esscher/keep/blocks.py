"""Queries some at a time: what needs all pairs of queries and keys never has them open at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from esscher.keep.context import Context

__all__ = ["PAIRS", "blocks"]

# of queries and keys open at once: four megabytes for each matrix that a rule makes of them
PAIRS = 1 << 19


def blocks(context: Context) -> Iterator[tuple[Tensor, Context]]:
    """Rows and what the queries in them see; the context itself where it is small or has its scores
    already.
    """
    rows = torch.arange(len(context.q), device=context.k.device)
    step = max(1, PAIRS // context.keys)
    if len(rows) <= step or "scores" in vars(context):
        yield rows, context
        return
    for part in torch.split(rows, step):
        yield part, context.take(part)
