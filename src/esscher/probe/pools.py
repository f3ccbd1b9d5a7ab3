"""The two pools of keys: a query's own context, and a whole corpus that streams by in parts.

Own context: a window goes through the model once. At each layer its queries meet all keys that the
model lets them attend to there, of which a few numbers of each query are left: memory does not grow
with the number of windows, and windows are the units of work. Every query that sees FEWEST keys is
used, with its own number of them.

Corpus: the windows of a part go through the model once for each block of layers; their keys and
values are held, and each head's queries meet them in blocks. A corpus of one part is finished at
once; states of several parts are stored, and merge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from esscher.hf.call import AttentionCall, at_least_single, softmax
from esscher.hf.gradients import DRAWS, FisherMetric, drawn_gradients, fisher_metric
from esscher.hf.interventions import prefill
from esscher.hf.loading import task_of
from esscher.keep import Impact, parse
from esscher.keep.rule import Rule
from esscher.probe.curves import AllKeys
from esscher.probe.measure import OVERFLOW, HeadNumbers, HeadState, Known, LayerState
from esscher.probe.session import FEWEST, Indices, Session
from esscher.probe.statistic import (
    HeadView,
    LayerInfo,
    LayerMoments,
    Rows,
    Statistic,
    concatenated,
)
from esscher.probe.statistics import statistics_of
from esscher.probe.statistics.frontier import compare_rules
from esscher.runs.progress import advance

PLACES = 64  # last places of a window, a quarter of it at most, where gradients are taken
QUARTER = 4
FIRST = 0  # the head whose keys are counted where a number is for all
KEY_BLOCK = 8192


# ---- queries of a window


@dataclass(frozen=True, eq=False)
class WindowQueries:
    """The queries at some positions of a window, in one layer.

    ``scores`` (H, m, T) are capped and biased as the model does it, -inf where a query does not see
    a key. ``place``: of the window in the captured batch.
    """

    session: Session
    captured: AttentionCall
    place: int
    window: int
    positions: Indices

    def at(self, positions: Indices) -> WindowQueries:
        """Other queries of the same window."""
        return WindowQueries(self.session, self.captured, self.place, self.window, positions)

    @cached_property
    def index(self) -> Tensor:
        return torch.from_numpy(self.positions).to(self.captured.query.device)

    @cached_property
    def call(self) -> AttentionCall:
        return self.captured.take(self.index, self.place)

    @cached_property
    def q(self) -> Tensor:
        """(H, m, k)."""
        return at_least_single(self.call.query[0])

    @cached_property
    def k(self) -> Tensor:
        """(H_kv, T, k)."""
        return at_least_single(self.call.key[0])

    @cached_property
    def v(self) -> Tensor:
        return at_least_single(self.call.value[0])

    @cached_property
    def scores(self) -> Tensor:
        return self.call.scores()[0]

    @cached_property
    def weights(self) -> Tensor:
        """(H, m, T); beside a sink logit they sum to less than 1."""
        return softmax(self.scores, self.sinks)

    @cached_property
    def sinks(self) -> Tensor | None:
        """(H,): a logit that stands in the softmax without a key (gpt_oss)."""
        return None if self.call.sinks is None else at_least_single(self.call.sinks)

    @cached_property
    def seen(self) -> Tensor:
        """(1 or H, m, T)."""
        return self.captured.visible(self.index)[self.place]

    def seen_by(self, head: int) -> Tensor:
        """Which keys (m, T) the queries of a head see."""
        return self.seen[head if len(self.seen) > 1 else 0]

    def bias_of(self, head: int) -> Tensor | None:
        if self.call.bias is None:
            return None
        bias = at_least_single(self.call.bias[0])
        return bias[head if len(bias) > 1 else 0]

    @property
    def heads(self) -> int:
        return self.captured.heads


def own_queries(
    session: Session, captured: AttentionCall, place: int, window: int
) -> WindowQueries:
    """Those of the probe."""
    positions = session.queries.positions[session.queries.inside(window)]
    return WindowQueries(session, captured, place, window, positions)


def window_metric(session: Session, window: int) -> FisherMetric | None:
    """The Fisher metric of every head at the last places of a window.

    The window is prefilled but for these places, where all heads are tapped at once: memory is that
    of a few tokens. None for a model without a language head, or without a cache.
    """
    model = session.loaded.model
    if task_of(model) != "language":
        return None
    real = session.windows.ids[window][~session.windows.padding[window]].astype(np.int64)
    ids = torch.from_numpy(real)[None].to(session.loaded.device)
    places = min(PLACES, ids.shape[1] // QUARTER)
    try:
        held = prefill(model, ids[:, :-places])
    except ValueError:  # the run then has no losses in nats, and says so
        return None
    generator = torch.Generator().manual_seed(session.spec.unit_seed({"window": window}))
    return fisher_metric(drawn_gradients(held, ids[:, -places:], DRAWS, generator))


# ---- a query's own context


def window_layers(session: Session, window: int, take: Callable[[LayerState], object]) -> None:
    """A forward pass, and one with gradients where rules are compared: ``take`` gets each layer
    with the numbers of the window's queries.
    """
    ruled = window in session.rule_windows
    rules = [parse(text) for text in session.spec.compared] if ruled else []
    grams = session.grams  # what needs passes of its own comes before the capture
    fisher = window_metric(session, window) if ruled else None
    behind = any(isinstance(part, Impact) for rule in rules for part in rule.parts)
    projections = session.projections if behind else {}

    def sink(captured: AttentionCall, batch: Indices) -> None:
        layer = captured.layer
        about = fisher, projections.get(layer)
        take(WindowLayer(session, captured, window, rules, *about).state(grams.get(layer)))
        advance((session.layers.index(layer) + 1) / len(session.layers))

    session.run(np.array([window]), session.layers, sink)


class WindowLayer:
    """One layer while a window passes it."""

    def __init__(
        self,
        session: Session,
        captured: AttentionCall,
        window: int,
        rules: Sequence[Rule],
        fisher: FisherMetric | None,
        projection: Tensor | None,
    ) -> None:
        self.session, self.captured, self.number = session, captured, window
        self.rules, self.fisher, self.projection = rules, fisher, projection
        self.info = LayerInfo.of(captured, own=True)
        self.queries = own_queries(session, captured, 0, window)
        self.notes: dict[str, Any] = {}
        self._by_kv_head: dict[int, dict[int, dict[str, Tensor]]] = {}

    # ---- what statistics may ask

    @cached_property
    def _outputs(self) -> Tensor:
        return self.captured.output(self.queries.index)[0].to(self.queries.v.dtype)

    def outputs(self, head: int) -> Tensor:
        return self._outputs[head]

    def rule_errors(self, head: int) -> dict[str, Tensor] | None:
        """Of the judged queries; heads that share keys are compared together."""
        if not self.rules or not self._enough:
            return None
        kv_head = self.info.kv_head(head)
        if kv_head not in self._by_kv_head:
            asked = self.session.rule_queries(self.number)
            metric = None if self.fisher is None else self.fisher.of_layer[self.info.layer]
            found = compare_rules(
                self._asking, asked, self.info, kv_head, self.rules, self.projection, metric
            )
            self._by_kv_head = {kv_head: found}  # heads come in order
        if head not in self._by_kv_head[kv_head]:
            raise ValueError(OVERFLOW)
        return self._by_kv_head[kv_head][head]

    @cached_property
    def _asking(self) -> Any:
        return self.queries.at(self.session.rule_queries(self.number).positions)

    @cached_property
    def _enough(self) -> bool:
        """Whether the judged queries see enough keys."""
        asked = self.session.rule_queries(self.number)
        seen = self._asking.seen_by(FIRST)[len(asked.choosing) :].sum(1)
        return bool((seen >= FEWEST).all()) and len(seen) > 0

    # ---- the numbers of its heads

    def state(self, gram: Tensor | None) -> LayerState:
        session, layer = self.session, self.info.layer
        rows = Rows.of(self.captured, *session.masks(np.array([self.number])))
        statistics = statistics_of(session.spec)
        in_window = {each.name: each.in_window(self.queries) for each in statistics}
        heads: dict[int, Known] = {}
        for head in session.heads(layer):
            rows_seen = self.queries.seen_by(head).sum(1) >= FEWEST
            if not bool(rows_seen.any()):
                heads[head] = ""
                continue
            try:
                view = self._view(head, rows_seen.nonzero()[:, 0])
                found = {each.name: dict(each.measure(view)) for each in statistics}
            except ValueError as reason:
                heads[head] = str(reason)
                continue
            for name, more in in_window.items():
                found[name] |= {key: x[head] for key, x in more.items()}
            found = {n: {key: x.cpu() for key, x in part.items()} for n, part in found.items()}
            assert view.seen is not None
            assert view.rows is not None
            numbers = torch.from_numpy(session.queries.inside(self.number))[view.rows.cpu()]
            keys = (view.seen & (view.positions >= 0)).sum(1).cpu()
            heads[head] = HeadNumbers(found, numbers, numbers[view.kept], keys)
        return LayerState(self.info, LayerMoments.of(rows), gram, heads)

    def _view(self, head: int, rows: Tensor) -> HeadView:
        """The queries of one head that see enough keys, and all that they see."""
        queries, info = self.queries, self.info
        seen = queries.seen_by(head)[rows]
        some = seen.any(0)
        keys = slice(None) if bool(some.all()) else some.nonzero()[:, 0]
        seen, scores = seen[:, keys], queries.scores[head, rows][:, keys]
        own = info.kv_head(head)
        q, k, v = queries.q[head, rows], queries.k[own, keys], queries.v[own, keys]
        if not bool((torch.isfinite(scores) | ~seen).all()) or not bool(torch.isfinite(v).all()):
            raise ValueError(OVERFLOW)
        bias, sink = queries.bias_of(head), None
        if queries.sinks is not None:
            sink = queries.sinks[head].expand(len(rows))
        bias = None if bias is None else bias[rows][:, keys]
        everything = AllKeys(q, k, v, info.scale, bias, seen, info.softcap, sink)
        positions = torch.arange(queries.k.shape[1], device=k.device)[keys]
        if sink is not None:  # draws take it for one more key, of value 0
            scores = torch.cat([scores, sink[:, None]], 1)
            k, v, seen = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1)), pad(seen, (0, 1), value=True)
            positions = pad(positions, (0, 1), value=-1)
        numbers = self.session.queries.inside(self.number)[rows.cpu().numpy()]
        kept = np.flatnonzero(np.isin(numbers, self.session.kept_queries(info.layer)))
        return HeadView(
            *(self.session.spec, info, head, self.session.mean_keys(info.layer)),
            *(self.session.most_keys(info.layer), self.notes),
            *(q, k, v, positions, torch.from_numpy(kept), v.double().mean(0)),
            seen=seen,
            given=scores,
            all_keys=everything,
            window=self,
            rows=rows,
        )


# ---- a corpus


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
