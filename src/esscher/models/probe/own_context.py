"""A query's real context as its pool: all that the model lets it attend to in its own window, special tokens included.

A window goes through the model once. At each layer its queries meet its keys, and what is left of them is settled at once: a
few numbers of each query. So memory does not grow with the number of windows, and windows are the units of work.

Contexts differ in their number of keys, a causal query's with its place. Every query that sees FEWEST keys is used, with its
own number of them: keys are kept at one fraction of each context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch

from esscher.keep import parse
from esscher.keep.rule import Rule
from esscher.models.huggingface.capture import Captured
from esscher.models.probe import head as head_state
from esscher.models.probe.context import Indices, ProbeContext
from esscher.models.probe.head import HeadState, kept_rows
from esscher.models.probe.layer import LayerState
from esscher.models.probe.queries import WindowQueries
from esscher.models.probe.statistics import Block, Met, Start, Statistic, statistics_of
from esscher.models.probe.tokens import LayerInfo, LayerMoments, Rows
from esscher.models.probe.wide import Held
from esscher.models.probe.window import Window
from esscher.runs.progress import advance

__all__ = ["FEWEST", "compared", "join_windows", "whole_layer", "window_states"]

FEWEST = 16  # keys a context must have
FIRST = 0  # the head whose keys are counted where a number is for all


def window_states(probe: ProbeContext, window: int, take: Callable[[LayerState], object]) -> None:
    """One forward pass: ``take`` gets the settled state of each layer for the queries of a window, as it goes by."""
    statistics = statistics_of(probe.spec)
    rules = [parse(text) for text in probe.spec.compared] if window in compared(probe) else []

    def sink(captured: Captured, batch: Indices) -> None:
        take(_Layer(probe, statistics, rules, captured, window).state())
        advance((probe.layers.index(captured.layer) + 1) / len(probe.layers))

    probe.run(np.array([window]), probe.layers, sink)


def join_windows(a: LayerState, b: LayerState) -> LayerState:
    """The state of a layer over the queries of both; a head that could not go on in one of them has the reason."""
    heads: dict[int, HeadState | str] = {}
    for head, one in a.heads.items():
        other = b.heads[head]
        if isinstance(one, HeadState) and isinstance(other, HeadState):
            heads[head] = head_state.stack([one, other])
        else:  # a reason goes before a state, and a state before nothing
            heads[head] = max(one, other, key=lambda known: 1 if isinstance(known, HeadState) else 2 * bool(known))
    return replace(a, moments=a.moments.merge(b.moments), heads=heads)


def whole_layer(probe: ProbeContext, state: LayerState) -> LayerState:
    """The state over all windows, with a note on queries that see too few keys."""
    few = f"no query sees {FEWEST} keys, at most {state.keys} of them; use longer windows"
    heads = {head: known or few if isinstance(known, str) else known for head, known in state.heads.items()}
    asked = len(probe.places)
    used = max((len(known.queries) for known in heads.values() if isinstance(known, HeadState)), default=0)
    left_out = f"{asked - used} of {asked} queries see fewer than {FEWEST} keys and are left out" if 0 < used < asked else ""
    note = "; ".join(part for part in (state.info.note, left_out) if part)
    return replace(state, info=replace(state.info, note=note), heads=heads)


class _Layer:
    """One layer while a window passes it."""

    def __init__(
        self, probe: ProbeContext, statistics: tuple[Statistic, ...], rules: Sequence[Rule], captured: Captured, window: int
    ) -> None:
        self.probe, self.statistics, self.rules, self.captured, self.window = probe, statistics, rules, captured, window
        self.info = LayerInfo.of(captured, own=True)
        self.queries = WindowQueries.of(probe, captured, 0, window, self.info)
        at = torch.from_numpy(probe.places.positions[self.queries.rows]).to(captured.query.device)
        self.outputs = captured.output(at)[0].to(self.queries.v.dtype)
        self.foreseen = probe.foreseen(self.info.layer)
        self.asked = _asked(probe, self.info.layer)
        self.notes: dict[str, dict[str, Any]] = {}

    def state(self) -> LayerState:
        """Heads that share keys come one after the other: what keep rules cost them is found once."""
        masks = self.probe.pooled, self.probe.windows.special
        rows = Rows.of(self.captured, *(torch.from_numpy(mask[[self.window]]).to(self.captured.query.device) for mask in masks))
        moments = LayerMoments.of(rows)
        heads: dict[int, HeadState | str] = {}
        asking = self._asking()
        for kv_head, sharing in groupby(self.probe.heads(self.info.layer), self.info.kv_head):
            by_rule = Window(self.queries, self.info, kv_head, asking, self.probe.places, self.rules) if asking.size else None
            for head in sharing:
                try:
                    heads[head] = self._head(head, by_rule)
                except ValueError as reason:
                    heads[head] = str(reason)
        return LayerState(self.info, moments, heads, self.keys)

    @property
    def keys(self) -> int:
        """That a query of the probe sees here, as foreseen: the mean over those that see enough."""
        enough = self.foreseen[self.foreseen >= FEWEST]
        return round(float((enough if enough.size else self.foreseen).mean()))

    def _head(self, head: int, by_rule: Window | None) -> HeadState | str:
        """The settled state of one head; an empty word where no query of the window sees enough keys."""
        queries, own = self.queries, self.info.kv_head(head)
        seen = queries.seen_by(head)
        enough = seen.sum(1) >= FEWEST
        if not bool(enough.any()):
            return ""
        rows = enough.nonzero()[:, 0]
        some = seen[rows].any(0)
        keys = slice(None) if bool(some.all()) else some.nonzero()[:, 0]
        seen, scores = seen[rows][:, keys], queries.scores[head, rows][:, keys]
        q, k, v = queries.q[head, rows], queries.k[own, keys], queries.v[own, keys]
        numbers = torch.from_numpy(queries.rows)[rows.cpu()]
        kept = torch.from_numpy(np.flatnonzero(np.isin(numbers.numpy(), self.asked)))
        bias = queries.bias_of(head)
        pool = None
        if self.info.softcap is None:  # a cap keeps scores on the grid
            pool = Held(q, k, v, self.info.scale, None if bias is None else bias[rows][:, keys], seen)
        start = Start(kept, queries.sink_mass[head, rows], int(self.foreseen.max()), v.double().mean(0), q.dtype)
        positions = torch.arange(queries.k.shape[1], device=k.device)[keys] + queries.first
        rules = None if by_rule is None else partial(by_rule.errors, head, numbers.numpy())
        block = Block(scores, q, k, v, positions, kept, None, pool, rules, seen, self.outputs[head, rows])
        state = head_state.update(head_state.init(self.statistics, start, numbers), block)
        return head_state.settle(state, Met(self.probe.spec, self.info, head, self.keys, {}), self.notes)

    def _asking(self) -> Indices:
        """Places of the queries that keep rules are compared for: the deepest of the window; none where rules are not."""
        if not self.rules:
            return np.zeros(0, dtype=np.int64)
        members = np.flatnonzero(np.isin(self.queries.rows, self.probe.deepest(self.window)))
        enough = self.queries.seen_by(FIRST)[torch.from_numpy(members)].sum(1).cpu().numpy() >= FEWEST
        return members[enough]


def _asked(probe: ProbeContext, layer: int) -> Indices:
    """Numbers of the queries that errors of kept keys are asked of, evenly spread over those that see enough keys."""
    able = np.flatnonzero(probe.foreseen(layer) >= FEWEST)
    return able[kept_rows(len(able), probe.spec.kept_queries).numpy()] if able.size else able


def compared(probe: ProbeContext) -> set[int]:
    """Windows in which keep rules are compared: whole ones, as the queries of a window decide together, evenly spread, as many
    as hold the queries that errors of kept keys are asked of.
    """
    windows = np.unique(probe.places.windows)
    share = min(1.0, probe.spec.kept_queries / len(probe.places))
    return set(windows[kept_rows(len(windows), math.ceil(share * len(windows))).numpy()].tolist())
