"""Forward passes that feed the states of layers: all tokens held at once where they fit, else
streamed block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from esscher.models.huggingface.capture import AttentionCall
from esscher.models.probe.context import Indices, ProbeContext
from esscher.models.probe.layer import LayerState, add_keys, add_moments, begin
from esscher.models.probe.queries import LayerQueries, QueryCollector, capture_queries
from esscher.models.probe.tokens import LayerMoments, Rows

__all__ = ["PooledLayer", "hold", "stream"]


@dataclass(frozen=True)
class PooledLayer:
    """All pooled tokens of a layer; ``rows.q`` is empty unless the spec asks for moments."""

    queries: LayerQueries
    moments: LayerMoments
    rows: Rows


def hold(context: ProbeContext) -> dict[int, PooledLayer]:
    """Queries, moments and pooled tokens of every layer from one pass over the corpus."""
    collector = QueryCollector(context)
    moments: dict[int, LayerMoments] = {}
    parts: dict[int, list[Rows]] = {}

    def sink(captured: AttentionCall, batch: Indices) -> None:
        collector(captured, batch)
        layer, rows = captured.layer, _rows(context, captured, batch)
        own = LayerMoments.of(rows)
        moments[layer] = moments[layer].merge(own) if layer in moments else own
        q = rows.q if context.spec.moments else rows.q[:, :0]
        parts.setdefault(layer, []).append(
            Rows(q, rows.k, rows.v, rows.positions, None, pieces=rows.pieces)
        )

    (windows,) = context.parts
    context.run(windows, context.layers, sink)
    found = {}
    for layer in context.layers:
        q, k, v = (
            torch.cat([getattr(rows, name) for rows in parts[layer]], dim=1)
            for name in ("q", "k", "v")
        )
        positions = torch.cat([rows.positions for rows in parts[layer]])
        pieces = torch.cat([rows.pieces for rows in parts.pop(layer) if rows.pieces is not None])
        found[layer] = PooledLayer(
            collector.result(layer), moments[layer], Rows(q, k, v, positions, None, pieces=pieces)
        )
    return found


def stream(context: ProbeContext, layers: Sequence[int], windows: Indices) -> list[LayerState]:
    """The states of some layers over some windows; nothing is kept of a block once the states have
    seen it.
    """
    queries = context.once(capture_queries, tuple(layers))
    states: dict[int, LayerState] = {}

    def sink(captured: AttentionCall, batch: Indices) -> None:
        layer, rows = captured.layer, _rows(context, captured, batch)
        state = states[layer] if layer in states else begin(context, queries[layer], rows)
        states[layer] = add_keys(add_moments(state, rows), queries[layer], rows)

    context.run(windows, layers, sink)
    return [states[layer] for layer in layers]


def _rows(context: ProbeContext, captured: AttentionCall, batch: Indices) -> Rows:
    masks = context.pooled, context.windows.special, context.pieces
    return Rows.of(
        captured, *(torch.from_numpy(mask[batch]).to(captured.query.device) for mask in masks)
    )
