"""A query's real context as its pool: all that the model lets it attend to in its own window,
special tokens included.

A window goes through the model once. At each layer its queries meet its keys, and what is left of
them is settled at once: a few numbers of each query. So memory does not grow with the number of
windows, and windows are the units of work.

Contexts differ in their number of keys, a causal query's with its place. Every query that sees
FEWEST keys is used, with its own number of them: keys are kept at one fraction of each context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from esscher.hf.call import AttentionCall
from esscher.keep import Impact, parse
from esscher.keep.rule import Rule
from esscher.probe import layer as head_state
from esscher.probe.layer import HeadState, LayerState, kept_rows
from esscher.probe.queries import WindowQueries, window_gradients
from esscher.probe.rules import Window
from esscher.probe.session import Asked, Indices, ProbeContext
from esscher.probe.statistics.base import Block, Met, Order, Start, Statistic
from esscher.probe.statistics.registry import statistics_of
from esscher.probe.tokens import LayerInfo, LayerMoments, Rows
from esscher.probe.wide import Held
from esscher.runs.progress import advance

FEWEST = 16  # keys a context must have
WIDE = 100.0  # nats that scores of heads span which are measured together
FIRST = 0  # the head whose keys are counted where a number is for all


def window_states(probe: ProbeContext, window: int, take: Callable[[LayerState], object]) -> None:
    """A forward pass, and where rules are compared one for gradients: ``take`` gets the settled
    state of each layer for the queries of a window, as it goes by.
    """
    statistics = statistics_of(probe.spec)
    comparison = _Comparison.of(probe, window) if window in compared(probe) else _Comparison()

    def sink(captured: AttentionCall, batch: Indices) -> None:
        take(_Layer(probe, statistics, comparison, captured, window).state())
        advance((probe.layers.index(captured.layer) + 1) / len(probe.layers))

    probe.run(np.array([window]), probe.layers, sink)


def join_windows(a: LayerState, b: LayerState) -> LayerState:
    """The state of a layer over the queries of both; a head that could not go on in one of them has
    the reason.
    """
    heads: dict[int, HeadState | str] = {}
    for head, one in a.heads.items():
        other = b.heads[head]
        if isinstance(one, HeadState) and isinstance(other, HeadState):
            heads[head] = head_state.stack([one, other])
        else:  # a reason goes before a state, and a state before nothing
            heads[head] = max(
                one, other, key=lambda known: 1 if isinstance(known, HeadState) else 2 * bool(known)
            )
    return replace(a, moments=a.moments.merge(b.moments), heads=heads)


def whole_layer(probe: ProbeContext, state: LayerState) -> LayerState:
    """The state over all windows, with a note on queries that see too few keys."""
    few = f"no query sees {FEWEST} keys, at most {state.keys} of them; use longer windows"
    heads = {
        head: known or few if isinstance(known, str) else known
        for head, known in state.heads.items()
    }
    asked = len(probe.places)
    used = max(
        (len(known.queries) for known in heads.values() if isinstance(known, HeadState)), default=0
    )
    left_out = (
        f"{asked - used} of {asked} queries see fewer than {FEWEST} keys and are left out"
        if 0 < used < asked
        else ""
    )
    note = "; ".join(part for part in (state.info.note, left_out) if part)
    return replace(state, info=replace(state.info, note=note), heads=heads)


@dataclass(frozen=True)
class _Comparison:
    """What is needed of a window in which keep rules are compared: the rules, by layer what next
    tokens feel of each head, and W_O where a rule asks what lies behind a head.
    """

    rules: Sequence[Rule] = ()
    gradients: Mapping[int, Sequence[float]] = field(default_factory=dict)
    outputs: Mapping[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, probe: ProbeContext, window: int) -> _Comparison:
        rules = [parse(text) for text in probe.spec.compared]
        behind = any(isinstance(part, Impact) for rule in rules for part in rule.parts)
        return cls(
            rules, window_gradients(probe, window) if rules else {}, probe.outputs if behind else {}
        )


@dataclass(frozen=True)
class _Own:
    """The queries of one head, or of several that share keys, and all that they see."""

    numbers: Tensor
    start: Start
    block: Block

    @classmethod
    def joined(cls, parts: Sequence[_Own]) -> _Own:
        """The queries of all below each other: they see the same keys."""
        first = parts[0]
        sizes = [i * len(first.numbers) for i in range(len(parts))]
        kept = torch.cat([part.start.kept + size for part, size in zip(parts, sizes, strict=True)])
        start = replace(
            first.start, kept=kept, sink_mass=torch.cat([part.start.sink_mass for part in parts])
        )
        blocks = [part.block for part in parts]
        rows = _below(blocks, ("scores", "queries", "seen", "outputs"))
        pool = first.block.pool
        if pool is not None:
            pool = replace(
                pool, **_below([block.pool for block in blocks], ("q", "bias", "seen", "sink"))
            )
        return cls(
            torch.cat([part.numbers for part in parts]),
            start,
            replace(first.block, **rows, kept=kept, pool=pool, by_rule=None),
        )


def _below(parts: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """Tensors of these names, those of all parts below each other; None where they have none."""
    found = {name: [getattr(part, name) for part in parts] for name in names}
    return {name: None if rows[0] is None else torch.cat(rows) for name, rows in found.items()}


def _alike(parts: Sequence[_Own]) -> bool:
    """Whether the same queries of all heads see the same keys, and no scores so wide that one head
    would hold up the others.
    """
    first = parts[0]
    for part in parts:
        same = torch.equal(part.numbers, first.numbers) and torch.equal(
            part.block.positions, first.block.positions
        )
        scores, seen = part.block.scores, part.block.seen
        low = scores if seen is None else torch.where(seen, scores, torch.inf)
        if not same or not bool((scores.amax(1) - low.amin(1) < WIDE).all()):
            return False
    return True


class _Layer:
    """One layer while a window passes it."""

    def __init__(
        self,
        probe: ProbeContext,
        statistics: tuple[Statistic, ...],
        asked: _Comparison,
        captured: AttentionCall,
        window: int,
    ) -> None:
        self.probe, self.statistics, self.captured, self.window = (
            probe,
            statistics,
            captured,
            window,
        )
        self.rules = asked.rules
        self.gradients, self.output = (
            asked.gradients.get(captured.layer),
            asked.outputs.get(captured.layer),
        )
        self.info = LayerInfo.of(captured, own=True)
        self.queries = WindowQueries.of(probe, captured, 0, window)
        at = torch.from_numpy(probe.places.positions[self.queries.rows]).to(captured.query.device)
        self.outputs = captured.output(at)[0].to(self.queries.v.dtype)
        self.foreseen = probe.foreseen(self.info.layer)
        self.asked = _asked(probe, self.info.layer)
        self.notes: dict[str, dict[str, Any]] = {}

    def state(self) -> LayerState:
        """Heads that share keys come one after the other: what keep rules cost them is found
        once.
        """
        masks = self.probe.pooled, self.probe.windows.special
        rows = Rows.of(
            self.captured,
            *(
                torch.from_numpy(mask[[self.window]]).to(self.captured.query.device)
                for mask in masks
            ),
        )
        moments = LayerMoments.of(rows)
        heads: dict[int, HeadState | str] = {}
        asking = self._asking() if self.rules else None
        for kv_head, sharing in groupby(self.probe.heads(self.info.layer), self.info.kv_head):
            by_rule = (
                None
                if asking is None
                else Window(*asking, self.info, kv_head, self.rules, self.output)
            )
            own = {head: self._own(head, by_rule) for head in sharing}
            common = self._together({head: one for head, one in own.items() if one is not None})
            for head, one in own.items():
                try:
                    heads[head] = (
                        "" if one is None else self._settled(head, one, common.get(head, {}))
                    )
                except ValueError as reason:
                    heads[head] = str(reason)
        return LayerState(self.info, moments, heads, self.keys)

    @property
    def keys(self) -> int:
        """That a query of the probe sees here, as foreseen: the mean over those that see enough."""
        enough = self.foreseen[self.foreseen >= FEWEST]
        return round(float((enough if enough.size else self.foreseen).mean()))

    def _settled(self, head: int, own: _Own, common: Mapping[str, Any]) -> HeadState:
        """The settled state of one head; ``common``: what was found of some statistics with other
        heads.
        """
        alone = tuple(each for each in self.statistics if each.name not in common)
        state = self._measured(head, alone, own)
        states = {
            each.name: common.get(each.name, state.states.get(each.name))
            for each in self.statistics
        }
        return replace(state, statistics=self.statistics, states=states)

    def _measured(self, head: int, statistics: tuple[Statistic, ...], own: _Own) -> HeadState:
        state = head_state.update(head_state.init(statistics, own.start, own.numbers), own.block)
        return head_state.settle(
            state, Met(self.probe.spec, self.info, head, self.keys, {}), self.notes
        )

    def _together(self, own: Mapping[int, _Own]) -> dict[int, dict[str, Any]]:
        """Settled states, by head and statistic, of statistics that take the queries of all heads
        of the same keys at once.

        A few large products of matrices are faster than many small ones. Empty where heads must be
        measured alone.
        """
        statistics = tuple(each for each in self.statistics if each.together)
        if len(own) < 2 or not statistics or not _alike(list(own.values())):
            return {}
        try:
            state = self._measured(next(iter(own)), statistics, _Own.joined(list(own.values())))
        except ValueError:  # of one of them
            return {}
        found = {}
        for i, (head, one) in enumerate(own.items()):
            queries, kept = len(one.numbers), len(one.start.kept)
            order = Order(i * queries + torch.arange(queries), i * kept + torch.arange(kept))
            found[head] = {
                each.name: each.stack([state.states[each.name]], order) for each in statistics
            }
        return found

    def _own(self, head: int, by_rule: Window | None) -> _Own | None:
        """What one head's statistics are given; None where no query of the window sees enough
        keys.
        """
        queries, own = self.queries, self.info.kv_head(head)
        seen = queries.seen_by(head)
        enough = seen.sum(1) >= FEWEST
        if not bool(enough.any()):
            return None
        rows = enough.nonzero()[:, 0]
        some = seen[rows].any(0)
        keys = slice(None) if bool(some.all()) else some.nonzero()[:, 0]
        seen, scores = seen[rows][:, keys], queries.scores[head, rows][:, keys]
        q, k, v = queries.q[head, rows], queries.k[own, keys], queries.v[own, keys]
        numbers = torch.from_numpy(queries.rows)[rows.cpu()]
        kept = torch.from_numpy(np.flatnonzero(np.isin(numbers.numpy(), self.asked)))
        bias, sink = queries.bias_of(head), None
        bias = None if bias is None else bias[rows][:, keys]
        positions = torch.arange(queries.k.shape[1], device=k.device)[keys]
        if queries.sinks is not None:
            sink = queries.sinks[head].expand(len(rows))
        pool = Held(q, k, v, self.info.scale, bias, seen, self.info.softcap, sink)
        if sink is not None:  # draws take it for one more key, of value 0
            scores = torch.cat([scores, sink[:, None]], 1)
            k, v, seen = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1)), pad(seen, (0, 1), value=True)
            positions = pad(positions, (0, 1), value=-1)
        start = Start(
            kept,
            queries.sink_mass[head, rows],
            int(self.foreseen.max()),
            v.double().mean(0),
            q.dtype,
        )
        rules = None if by_rule is None else partial(by_rule.errors, head)
        felt = None if self.gradients is None else self.gradients[head]
        block = Block(
            scores,
            q,
            k,
            v,
            positions,
            kept,
            None,
            pool,
            rules,
            seen,
            self.outputs[head, rows],
            gradient=felt,
        )
        return _Own(numbers, start, block)

    def _asking(self) -> tuple[WindowQueries, Asked] | None:
        """The queries that keep rules are compared for; None where those that are judged see too
        few keys.
        """
        asked = self.probe.asked(self.window)
        queries = WindowQueries.of(self.probe, self.captured, 0, self.window, asked.positions)
        seen = queries.seen_by(FIRST)[len(asked.choosing) :].sum(1)
        return (queries, asked) if bool((seen >= FEWEST).all()) and len(seen) else None


def _asked(probe: ProbeContext, layer: int) -> Indices:
    """Numbers of the queries that errors of kept keys are asked of, evenly spread over those that
    see enough keys.
    """
    able = np.flatnonzero(probe.foreseen(layer) >= FEWEST)
    return able[kept_rows(len(able), probe.spec.kept_queries).numpy()] if able.size else able


def compared(probe: ProbeContext) -> set[int]:
    """Windows in which keep rules are compared: whole ones, as the queries of a window decide
    together, evenly spread, as many as hold the queries that errors of kept keys are asked of.
    """
    windows = np.unique(probe.places.windows)
    share = min(1.0, probe.spec.kept_queries / len(probe.places))
    return set(windows[kept_rows(len(windows), math.ceil(share * len(windows))).numpy()].tolist())
