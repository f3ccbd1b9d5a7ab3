"""Forward passes that feed the states of layers: all tokens held at once where they fit, else streamed block by block."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from esscher.models.huggingface.capture import Captured
from esscher.models.probe.context import Indices, TokenSource, source_of
from esscher.models.probe.layer import LayerState, add_keys, add_moments, begin
from esscher.models.probe.queries import LayerQueries, QueryCollector, capture_queries
from esscher.models.probe.spec import ProbeSpec
from esscher.models.probe.tokens import LayerMoments, Rows

__all__ = ["PooledLayer", "fits", "forget_tokens", "hold", "stream"]

MEMORY = 1.5e9  # bytes of captured queries, keys and values that a process may hold


@dataclass(frozen=True)
class PooledLayer:
    """All pooled tokens of a layer; ``rows.q`` is empty unless the spec asks for moments."""

    queries: LayerQueries
    moments: LayerMoments
    rows: Rows


def fits(source: TokenSource) -> bool:
    """Whether the keys and values of all layers may be held, so that one forward pass serves every unit."""
    return sum(_bytes_per_token(source, layer) for layer in source.layers) * source.keys <= MEMORY


def _bytes_per_token(source: TokenSource, layer: int) -> int:
    shape = source.loaded.shapes[layer]
    numbers = shape.kv_heads * (shape.width + shape.value_width) + (shape.heads * shape.width if source.spec.moments else 0)
    return 4 * numbers


@functools.lru_cache(maxsize=1)
def hold(spec: ProbeSpec) -> dict[int, PooledLayer]:
    """Queries, moments and pooled tokens of every layer from one pass over the corpus, once in a process."""
    source = source_of(spec)
    collector = QueryCollector(source, contexts=False)
    moments: dict[int, LayerMoments] = {}
    parts: dict[int, list[Rows]] = {}

    def sink(captured: Captured, batch: Indices) -> None:
        collector(captured, batch)
        layer, rows = captured.layer, _rows(source, captured, batch)
        own = LayerMoments.of(rows)
        moments[layer] = moments[layer].merge(own) if layer in moments else own
        q = rows.q if spec.moments else rows.q[:, :0]
        parts.setdefault(layer, []).append(Rows(q, rows.k, rows.v, rows.positions, None))

    (windows,) = source.parts
    source.run(windows, source.layers, sink)
    found = {}
    for layer in source.layers:
        q, k, v = (torch.cat([getattr(rows, name) for rows in parts[layer]], dim=1) for name in ("q", "k", "v"))
        positions = torch.cat([rows.positions for rows in parts.pop(layer)])
        found[layer] = PooledLayer(collector.result(layer), moments[layer], Rows(q, k, v, positions, None))
    return found


def forget_tokens() -> None:
    hold.cache_clear()
    _queries.cache_clear()


@functools.lru_cache(maxsize=1)
def _queries(spec: ProbeSpec, layers: tuple[int, ...]) -> dict[int, LayerQueries]:
    return capture_queries(source_of(spec), layers)


def stream(source: TokenSource, layers: Sequence[int], windows: Indices) -> list[LayerState]:
    """The states of some layers over some windows; nothing is kept of a block once the states have seen it."""
    queries = _queries(source.spec, tuple(layers))
    states: dict[int, LayerState] = {}

    def sink(captured: Captured, batch: Indices) -> None:
        layer, rows = captured.layer, _rows(source, captured, batch)
        state = states[layer] if layer in states else begin(source, queries[layer], rows)
        states[layer] = add_keys(add_moments(state, rows), queries[layer], rows)

    source.run(windows, layers, sink)
    return [states[layer] for layer in layers]


def _rows(source: TokenSource, captured: Captured, batch: Indices) -> Rows:
    return Rows.of(captured, torch.from_numpy(source.pooled[batch]).to(captured.query.device))
