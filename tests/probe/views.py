"""Views of heads for tests of single statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from esscher.probe.session import spread
from esscher.probe.spec import ProbeSpec
from esscher.probe.statistic import HeadView, LayerInfo

INFO = LayerInfo(0, 1, 1, 1.0, None, "")


def view(
    spec: ProbeSpec,
    scores: Tensor,
    values: Tensor | None = None,
    *,
    keys: int | None = None,
    kept: Tensor | None = None,
    **more: Any,
) -> HeadView:
    """Queries with these scores (m, B) for keys of these values (B, d); ``keys``: in all."""
    m, size = scores.shape
    values = torch.zeros(size, 1, dtype=scores.dtype) if values is None else values
    kept = torch.from_numpy(spread(m, spec.kept_queries)) if kept is None else kept
    total = size if keys is None else keys
    settings = {"center": values.double().mean(0), "positions": torch.arange(size), **more}
    return HeadView(
        *(spec, INFO, 0, total, total, {}),
        queries=torch.zeros(m, 2, dtype=scores.dtype),
        keys=torch.zeros(size, 2),
        values=values,
        kept=kept,
        given=scores,
        **settings,
    )
