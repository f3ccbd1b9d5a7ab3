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

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from esscher.hf.call import AttentionCall, at_least_single
from esscher.hf.capture import forward
from esscher.probe.measure import HeadState, LayerState, for_heads, head_of
from esscher.probe.session import FEWEST, Indices, Session
from esscher.probe.statistic import (
    OVERFLOW,
    HeadView,
    LayerInfo,
    LayerMoments,
    Numbers,
    Statistic,
    token_tensors,
)
from esscher.probe.statistics import statistics_of
from esscher.runs.executors import give_back
from esscher.runs.progress import advance

KEY_BLOCK = 8192


def own_call(session: Session, captured: AttentionCall, place: int, window: int) -> AttentionCall:
    """The attention of the probe's queries in a window; ``place``: of the window in the batch."""
    at = torch.from_numpy(session.queries.positions[session.queries.inside(window)])
    return captured.take(at.to(captured.query.device), place)


def resting(session: Session, window: int) -> Tensor:
    """(T,): which tokens of a window are its first one or special ones."""
    found = torch.from_numpy(session.windows.special[window].copy())
    found[0] = True
    return found


# ---- a query's own context


LAST = 16  # queries of a finding, and keys before each


def finding(call: AttentionCall) -> dict[str, Any]:
    """What the last queries of a layer attend to, while a probe runs: the effective number of keys
    of the median head, and the mean weight on the first key and on the last LAST.
    """
    at = torch.arange(call.query.shape[2], device=call.query.device)[-LAST:]
    weights = call.weights(at)[0].double()
    spread = 1 / weights.square().sum(-1).mean(-1)
    place = torch.arange(weights.shape[-1], device=at.device)
    recent = (place <= at[:, None]) & (place > at[:, None] - LAST)
    return {
        "layer": call.layer,
        "effective keys": float(spread.median()),
        "on the first key": f"{float(weights[..., 0].mean()):.0%}",
        f"on the last {LAST}": f"{float((weights * recent).sum(-1).mean()):.0%}",
    }


def first_look(session: Session, tokens: int = 256) -> list[dict[str, Any]]:
    """The finding of every layer on the first tokens of the text: one short forward pass."""
    rows: list[dict[str, Any]] = []
    inputs = {name: x[:, :tokens] for name, x in session.inputs(np.array([0])).items()}
    with torch.no_grad():
        forward(session.loaded.model, inputs, lambda call: rows.append(finding(call)))
    return rows


def window_layers(session: Session, window: int, take: Callable[[LayerState], object]) -> None:
    """A forward pass: ``take`` gets each layer with the numbers of the window's queries."""
    grams = session.grams  # what needs passes of its own comes before the capture
    before = {each.name: each.before(session, window) for each in statistics_of(session.spec)}

    def sink(captured: AttentionCall, batch: Indices) -> None:
        layer = captured.layer
        passing = WindowLayer(session, captured, window, before)
        moments, _ = pooled_tokens(session, captured, batch)
        take(LayerState(passing.info, moments, grams.get(layer), passing.head_states()))
        advance((session.layers.index(layer) + 1) / len(session.layers), finding(captured))

    session.run(np.array([window]), session.layers, sink)


@dataclass(frozen=True, eq=False)
class WindowLayer:
    """One layer while a window passes it, and what statistics may ask of it."""

    session: Session
    captured: AttentionCall
    number: int  # of the window
    before: dict[str, Any]  # what statistics found before the capture, by name
    notes: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def info(self) -> LayerInfo:
        return LayerInfo.of(self.captured, own=True)

    @cached_property
    def call(self) -> AttentionCall:
        return own_call(self.session, self.captured, 0, self.number)

    @cached_property
    def scores(self) -> Tensor:
        """(H, m, T) of the probe's queries; -inf where a query does not see a key."""
        return self.call.scores()[0]

    @cached_property
    def seen(self) -> Tensor:
        """(H, m, T)."""
        every = torch.arange(self.call.query.shape[2], device=self.call.query.device)
        return self.call.visible(every)[0].expand(self.call.heads, -1, -1)

    @cached_property
    def outputs(self) -> Tensor:
        """(H, m, d_v): the model's own."""
        return at_least_single(self.call.output()[0])

    def head_states(self) -> dict[int, HeadState | str]:
        """The numbers of each head's queries, or why it has none."""
        statistics, rest = statistics_of(self.session.spec), resting(self.session, self.number)
        in_window = {each.name: each.in_window(self.call, rest) for each in statistics}
        heads: dict[int, HeadState | str] = {}
        for head in self.session.heads(self.info.layer):
            rows = (self.seen[head].sum(1) >= FEWEST).nonzero()[:, 0]
            if not len(rows):
                heads[head] = ""
                continue
            try:
                view = self._view(head, rows)
                found = {
                    each.name: {
                        **each.measure(view),
                        **{key: x[head] for key, x in in_window[each.name].items()},
                    }
                    for each in statistics
                }
            except ValueError as reason:
                heads[head] = str(reason)
                continue
            found = {  # a view would be stored with all that it is a view of
                n: {key: x.cpu().clone() for key, x in part.items()} for n, part in found.items()
            }
            numbers = torch.from_numpy(self.session.queries.inside(self.number))[rows.cpu()]
            keys = self.seen[head, rows].sum(1).cpu()
            heads[head] = HeadState({}, found, numbers, numbers[view.kept], keys)
        return heads

    def _view(self, head: int, rows: Tensor) -> HeadView:
        """The queries of one head that see enough keys, and all that they see."""
        session, call, info = self.session, self.call, self.info
        seen, own = self.seen[head, rows], info.kv_head(head)
        keys = seen.any(0).nonzero()[:, 0]
        seen, scores = seen[:, keys], self.scores[head, rows][:, keys]
        parts = call.query[0, head, rows], call.key[0, own, keys], call.value[0, own, keys]
        q, k, v = (at_least_single(x) for x in parts)
        if not bool((torch.isfinite(scores) | ~seen).all()) or not bool(torch.isfinite(v).all()):
            raise ValueError(OVERFLOW)
        positions = keys
        if call.sinks is not None:  # draws take it for one more key, of value 0
            sink = at_least_single(call.sinks[head]).expand(len(rows), 1)
            scores, positions = torch.cat([scores, sink], 1), pad(positions, (0, 1), value=-1)
            k, v = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1))
        numbers = session.queries.inside(self.number)[rows.cpu().numpy()]
        kept = np.flatnonzero(np.isin(numbers, session.kept_queries(info.layer)))
        view = HeadView(
            **vars(head_of(session, info, head, self.notes)),
            queries=q,
            keys=k,
            values=v,
            positions=positions,
            kept=torch.from_numpy(kept),
            center=v.double().mean(0),
            given=scores,
            window=self,
            rows=rows,
        )
        return replace(view, whole=view)


# ---- a corpus


@dataclass(frozen=True)
class LayerQueries:
    """Queries (H, m, k) of a layer, and what statistics found in their own windows, (H, m)."""

    info: LayerInfo
    q: Tensor
    windows: dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class HeldLayer:
    """Queries of a layer, and the tokens of a part of the corpus: keys (H_kv, N, k), values (H_kv,
    N, d_v), their positions and their pieces of the pool (N,).
    """

    queries: LayerQueries
    moments: LayerMoments
    k: Tensor
    v: Tensor
    positions: Tensor
    pieces: Tensor


def pooled_tokens(
    session: Session, captured: AttentionCall, batch: Indices
) -> tuple[LayerMoments, tuple[Tensor, Tensor, Tensor]]:
    """Of the pooled tokens of a batch of windows: moments; and keys, values, and (B, 2) positions
    and pieces.
    """
    masks = (session.pooled, session.pieces)
    pooled, pieces = (torch.from_numpy(mask[batch]).to(captured.query.device) for mask in masks)
    hidden = None if captured.hidden is None else at_least_single(captured.hidden)[pooled]
    q, k, v = token_tensors(captured, pooled)
    places = torch.stack([pooled.nonzero()[:, 1], pieces[pooled]], 1)
    return LayerMoments.of(q, k, hidden), (k, v, places)


class _Asked:
    """Queries of layers, as the windows that have some pass by."""

    def __init__(self, session: Session) -> None:
        self.session, self.statistics = session, statistics_of(session.spec)
        self.windows = set(session.query_windows.tolist())
        self.info: dict[int, LayerInfo] = {}
        self.parts = defaultdict[int, list[tuple[Tensor, dict[str, Numbers]]]](list)

    def see(self, captured: AttentionCall, batch: Indices) -> None:
        self.info[captured.layer] = LayerInfo.of(captured)
        for place, window in enumerate(batch.tolist()):
            if window in self.windows:
                own = own_call(self.session, captured, place, window)
                rest = resting(self.session, window)
                numbers = {each.name: each.in_window(own, rest) for each in self.statistics}
                self.parts[captured.layer].append((at_least_single(own.query[0]), numbers))

    def found(self) -> dict[int, LayerQueries]:
        found = {}
        for layer, parts in self.parts.items():
            queries, numbers = zip(*parts, strict=True)
            joined = {
                name: {key: torch.cat([one[name][key] for one in numbers], 1).cpu() for key in own}
                for name, own in numbers[0].items()
            }
            found[layer] = LayerQueries(self.info[layer], torch.cat(queries, dim=1), joined)
        return found


def capture_queries(session: Session, layers: Sequence[int]) -> dict[int, LayerQueries]:
    """The queries of some layers, by forward passes over their windows."""
    asked = _Asked(session)
    session.run(session.query_windows, layers, asked.see)
    return asked.found()


def hold(session: Session, layers: tuple[int, ...], part: int) -> dict[int, HeldLayer]:
    """Queries, moments and pooled tokens of some layers over one part of the corpus; queries come
    from the same forward passes where the part has all of their windows.
    """
    windows, asked = session.parts[part], _Asked(session)
    together = bool(np.isin(session.query_windows, windows).all())
    moments: dict[int, LayerMoments] = {}
    tokens: dict[int, tuple[Tensor, ...]] = {}  # made at once: joined blocks would be there twice
    total, seen = int(session.pooled[windows].sum()), Counter[int]()

    def sink(captured: AttentionCall, batch: Indices) -> None:
        if together:
            asked.see(captured, batch)
        layer, (own, block) = captured.layer, pooled_tokens(session, captured, batch)
        moments[layer] = moments[layer].merge(own) if layer in moments else own
        if layer not in tokens:
            tokens[layer] = tuple(x.new_empty(*x.shape[:-2], total, x.shape[-1]) for x in block)
        some = slice(seen[layer], seen[layer] + block[0].shape[-2])
        for held, x in zip(tokens[layer], block, strict=True):
            held[..., some, :] = x
        seen[layer] = some.stop

    session.run(windows, layers, sink)
    queries = asked.found() if together else session.once(capture_queries, layers)
    found = {}
    for layer in layers:
        k, v, places = tokens.pop(layer)
        found[layer] = HeldLayer(queries[layer], moments[layer], k, v, places[:, 0], places[:, 1])
    give_back()
    return found


def held_layer(session: Session, layer: int, part: int = 0) -> HeldLayer:
    """The tokens of a layer, which stay in memory with those of its block."""
    (block,) = (tuple(block) for block in session.blocks if layer in block)
    return session.once(hold, block, part)[layer]


Measure = Callable[[int], HeadState | str]


def corpus_heads(session: Session, layer: int, part: int) -> tuple[LayerState, Measure]:
    """A layer over one part, and what gives the state of one of its heads."""
    held, statistics = held_layer(session, layer, part), statistics_of(session.spec)
    notes = dict[str, object]()

    def measure(head: int) -> HeadState | str:
        try:
            return _head_state(session, held, head, statistics, notes)
        except ValueError as reason:
            return str(reason)

    grams = session.grams.get(layer)
    return LayerState(held.queries.info, held.moments, grams, {}), measure


def corpus_layer(session: Session, layer: int, part: int) -> LayerState:
    """The states of all heads of a layer over one part."""
    state, measure = corpus_heads(session, layer, part)
    every = session.heads(layer)
    for head, found in zip(every, for_heads(measure, every, state.device), strict=True):
        state.heads[head] = found
        advance(len(state.heads) / len(every))
    return state


def _head_state(
    session: Session,
    held: HeldLayer,
    head: int,
    statistics: Sequence[Statistic],
    notes: dict[str, object],
) -> HeadState:
    info, q = held.queries.info, held.queries.q[head]
    k, v = held.k[info.kv_head(head)], held.v[info.kv_head(head)]
    if not bool(torch.isfinite(v).all()):
        raise ValueError(OVERFLOW)
    kept = torch.from_numpy(session.kept_queries(info.layer))
    view = HeadView(
        **vars(head_of(session, info, head, notes)),
        queries=q,
        keys=k,
        values=v,
        positions=held.positions,
        kept=kept,
        center=v.double().mean(0),
        pieces=held.pieces,
    )
    states = {each.name: each.init(view) for each in statistics}
    for start in range(0, len(k), KEY_BLOCK):
        some = slice(start, start + KEY_BLOCK)
        block = replace(
            view,
            keys=k[some],
            values=v[some],
            positions=held.positions[some],
            pieces=held.pieces[some],
            whole=view if len(session.parts) == 1 else None,
        )
        if not bool(torch.isfinite(block.scores).all()):
            raise ValueError(OVERFLOW)
        for each in statistics:  # one by one: old states are large
            states[each.name] = each.update(states[each.name], block)
    found = {
        name: {key: x[head] for key, x in own.items()} for name, own in held.queries.windows.items()
    }
    for each in statistics:  # those that do not stream see all keys at once
        if not each.streams:
            found[each.name] |= each.measure(view)
    numbers = torch.arange(len(q))
    return HeadState(states, found, numbers, kept, torch.full_like(numbers, len(k)))
