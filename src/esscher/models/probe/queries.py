"""The queries of a layer: taken out of the few windows they stand in, before any key is met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from esscher.models.huggingface.capture import Captured
from esscher.models.probe.context import Indices, ProbeContext
from esscher.models.probe.tokens import LayerInfo, scores_of

__all__ = ["Context", "LayerQueries", "QueryCollector", "capture_queries"]


@dataclass(frozen=True)
class Context:
    """A window as the pool of its own queries: their numbers, keys and values (H_kv, T, .), allowed (1 or H, m, T)."""

    rows: Indices
    k: Tensor
    v: Tensor
    allowed: Tensor

    def allowed_to(self, head: int) -> Tensor:
        """Which keys (m, T) the queries of a head may see; most masks are one for all heads."""
        return self.allowed[head if len(self.allowed) > 1 else 0]


@dataclass(frozen=True)
class LayerQueries:
    """Queries (H, m, k) of a layer, the weight (H, m) they put on sink tokens in their window, their contexts if asked."""

    info: LayerInfo
    q: Tensor
    sink_mass: Tensor
    contexts: tuple[Context, ...] = ()


class QueryCollector:
    """Takes the queries of each layer out of the windows they stand in, whichever batches these come in."""

    def __init__(self, source: ProbeContext, contexts: bool) -> None:
        self.source, self.contexts = source, contexts
        self.found: dict[int, dict[int, tuple[Tensor, Tensor, Context | None]]] = {}
        self.info: dict[int, LayerInfo] = {}

    def __call__(self, captured: Captured, batch: Indices) -> None:
        self.info.setdefault(captured.layer, LayerInfo.of(captured))
        for place, window in enumerate(batch.tolist()):
            rows = self.source.places.inside(window)
            if len(rows):
                self.found.setdefault(captured.layer, {})[window] = self._window(captured, place, window, rows)

    def _window(self, captured: Captured, place: int, window: int, rows: Indices) -> tuple[Tensor, Tensor, Context | None]:
        info = self.info[captured.layer]
        at = torch.from_numpy(self.source.places.positions[rows]).to(captured.query.device)
        wide = torch.float64 if captured.query.dtype == torch.float64 else torch.float32
        q = captured.query[place][:, at].to(wide)  # (H, m, k)
        k, v = captured.key[place].to(wide), captured.value[place].to(wide)
        visible = self._visible(captured, place, window, at)  # (1 or H, m, T)
        scores = scores_of(info, q, k.repeat_interleave(info.heads // info.kv_heads, dim=0))
        if captured.bias is not None:
            scores = scores + captured.bias.to(wide).expand(*captured.query.shape[:3], -1)[place][:, at]
        scores = scores.masked_fill(~visible, -torch.inf)
        resting = torch.from_numpy(self.source.sinks(window)).to(q.device)
        mass = scores.masked_fill(~resting, -torch.inf).logsumexp(-1)
        total = scores.logsumexp(-1)
        if captured.sinks is not None:
            logit = captured.sinks.to(wide)[:, None]
            mass, total = torch.logaddexp(mass, logit), torch.logaddexp(total, logit)
        context = None
        if self.contexts:
            pooled = torch.from_numpy(self.source.pooled[window]).to(q.device)
            context = Context(rows, k, v, visible & pooled)
        return q, (mass - total).exp(), context

    def _visible(self, captured: Captured, place: int, window: int, at: Tensor) -> Tensor:
        if captured.allowed is not None:
            return captured.allowed[place][:, at]
        real = torch.from_numpy(~self.source.windows.padding[window]).to(at.device)
        return real.expand(1, len(at), -1)

    def result(self, layer: int) -> LayerQueries:
        windows = self.found[layer]
        parts = [windows[window] for window in sorted(windows)]  # the order of source.places
        contexts = tuple(context for _, _, context in parts if context is not None)
        return LayerQueries(
            self.info[layer], torch.cat([q for q, _, _ in parts], 1), torch.cat([m for _, m, _ in parts], 1), contexts
        )


def capture_queries(source: ProbeContext, layers: Sequence[int], *, contexts: bool = False) -> dict[int, LayerQueries]:
    """The queries of some layers, by forward passes over their windows."""
    collector = QueryCollector(source, contexts)
    source.run(np.unique(source.places.windows), layers, collector)
    return {layer: collector.result(layer) for layer in layers}
