"""A corpus as the pool of all queries: a part of it at a time, one head after the other.

The windows of a part go through the model once for each block of layers; their keys and values are
held, and each head's queries meet them in blocks. A corpus of one part is finished at once; states
of several parts are stored, and merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esscher.hf.call import AttentionCall
from esscher.probe.all_keys import AllKeys
from esscher.probe.measure import OVERFLOW, HeadState, Known, LayerState
from esscher.probe.session import Indices, Session
from esscher.probe.statistic import HeadView, Statistic, concatenated
from esscher.probe.statistics.registry import statistics_of
from esscher.probe.tokens import LayerInfo, LayerMoments, Rows
from esscher.probe.window import own_queries
from esscher.runs.progress import advance

KEY_BLOCK = 8192


@dataclass(frozen=True)
class LayerQueries:
    """Queries (H, m, k) of a layer, and what statistics found in their own windows, by head."""

    info: LayerInfo
    q: Tensor
    windows: dict[int, dict[str, dict[str, Tensor]]]


@dataclass(frozen=True)
class PooledLayer:
    """Queries of a layer, and the tokens of a part; ``rows`` holds no queries of tokens."""

    queries: LayerQueries
    moments: LayerMoments
    rows: Rows


class _QueryCollector:
    """Takes the queries of each layer out of their windows, whichever batches these come in."""

    def __init__(self, session: Session) -> None:
        self.session, self.statistics = session, statistics_of(session.spec)
        self.asking = set(session.query_windows.tolist())
        self.info: dict[int, LayerInfo] = {}
        self.q: dict[int, dict[int, Tensor]] = {}
        self.found: dict[int, dict[int, dict[str, dict[str, Tensor]]]] = {}

    def __call__(self, captured: AttentionCall, batch: Indices) -> None:
        layer = captured.layer
        self.info.setdefault(layer, LayerInfo.of(captured))
        for place, window in enumerate(batch.tolist()):
            if window in self.asking:
                own = own_queries(self.session, captured, place, window)
                self.q.setdefault(layer, {})[window] = own.q
                found = {each.name: dict(each.in_window(own)) for each in self.statistics}
                self.found.setdefault(layer, {})[window] = {k: v for k, v in found.items() if v}

    def result(self, layer: int) -> LayerQueries:
        order = sorted(self.asking)  # that of session.queries
        q = torch.cat([self.q[layer][window] for window in order], dim=1)
        parts = [self.found[layer][window] for window in order]
        names = dict.fromkeys(name for part in parts for name in part)
        windows = {
            head: {
                name: concatenated(
                    [
                        {k: x[head].cpu() for k, x in part[name].items()}
                        for part in parts
                        if name in part
                    ]
                )
                for name in names
            }
            for head in self.session.heads(layer)
        }
        return LayerQueries(self.info[layer], q, windows)


def capture_queries(session: Session, layers: Sequence[int]) -> dict[int, LayerQueries]:
    """The queries of some layers, by forward passes over their windows."""
    collector = _QueryCollector(session)
    session.run(session.query_windows, layers, collector)
    return {layer: collector.result(layer) for layer in layers}


def hold(session: Session, layers: tuple[int, ...], part: int) -> dict[int, PooledLayer]:
    """Queries, moments and pooled tokens of some layers over one part of the corpus."""
    one, collector = len(session.parts) == 1, _QueryCollector(session)
    moments: dict[int, LayerMoments] = {}
    blocks: dict[int, list[Rows]] = {}

    def sink(captured: AttentionCall, batch: Indices) -> None:
        if one:
            collector(captured, batch)
        layer, rows = captured.layer, Rows.of(captured, *session.masks(batch))
        own = LayerMoments.of(rows)
        moments[layer] = moments[layer].merge(own) if layer in moments else own
        blocks.setdefault(layer, []).append(replace(rows, q=rows.q[:, :0], hidden=None))

    session.run(session.parts[part], layers, sink)
    queries = {} if one else session.once(capture_queries, layers)
    found = {}
    for layer in layers:
        own = collector.result(layer) if one else queries[layer]
        rows = blocks.pop(layer)
        k, v = (torch.cat([getattr(x, name) for x in rows], dim=1) for name in "kv")
        rest = (
            torch.cat([getattr(x, name) for x in rows]) for name in ("positions", "sinks", "pieces")
        )
        found[layer] = PooledLayer(own, moments[layer], Rows(rows[0].q, k, v, None, *rest))
    return found


def held_layer(session: Session, layer: int, part: int = 0) -> PooledLayer:
    """The tokens of a layer, which stay in memory with those of its block."""
    (block,) = (tuple(block) for block in session.blocks if layer in block)
    return session.once(hold, block, part)[layer]


def corpus_layer(
    session: Session, layer: int, part: int, heads: Sequence[int] | None = None
) -> LayerState:
    """The states of a layer's heads over one part."""
    pooled, statistics = held_layer(session, layer, part), statistics_of(session.spec)
    every, notes = session.heads(layer) if heads is None else heads, dict[str, object]()
    states: dict[int, Known] = {}
    for place, head in enumerate(every):
        try:
            states[head] = _head_state(session, pooled, head, statistics, notes)
        except ValueError as reason:
            states[head] = str(reason)
        advance((place + 1) / len(every))
    return LayerState(pooled.queries.info, pooled.moments, session.grams.get(layer), states)


def _head_state(
    session: Session,
    pooled: PooledLayer,
    head: int,
    statistics: Sequence[Statistic],
    notes: dict[str, object],
) -> HeadState:
    info, rows, q = pooled.queries.info, pooled.rows, pooled.queries.q[head]
    k, v = rows.k[info.kv_head(head)], rows.v[info.kv_head(head)]
    if not bool(torch.isfinite(v).all()):
        raise ValueError(OVERFLOW)
    whole = None
    if len(session.parts) == 1 and info.softcap is None:  # a cap keeps scores on the grid
        whole = AllKeys(q, k, v, info.scale)
    kept = torch.from_numpy(session.kept_queries(info.layer))
    view = HeadView(
        *(session.spec, info, head, session.keys, session.keys, notes),
        *(q, k, v, rows.positions, kept, v.double().mean(0)),
        pieces=rows.pieces,
        all_keys=whole,
    )
    states = {each.name: each.init(view) for each in statistics}
    for start in range(0, len(k), KEY_BLOCK):
        some = slice(start, start + KEY_BLOCK)
        block = replace(
            view,
            keys=k[some],
            values=v[some],
            positions=rows.positions[some],
            pieces=rows.pieces[some],
        )
        if not bool(torch.isfinite(block.scores).all()):
            raise ValueError(OVERFLOW)
        states = {each.name: each.update(states[each.name], block) for each in statistics}
    windows = {name: dict(found) for name, found in pooled.queries.windows[head].items()}
    for each in statistics:  # those that do not stream see all keys at once
        if not each.streams:
            windows[each.name] = {**windows.get(each.name, {}), **each.measure(view)}
    return HeadState(states, windows)
