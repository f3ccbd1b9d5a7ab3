"""A query's real context as its pool: the keys of its own window that the mask allows it to see.

Contexts differ in their number of keys, a causal query's with its place. Every query that sees FEWEST keys is used, with its
own number of them: keys are kept at one fraction of each context.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esscher.keep import parse
from esscher.models.huggingface.capture import Captured
from esscher.models.probe import head as head_state
from esscher.models.probe.context import Indices, ProbeContext
from esscher.models.probe.head import HeadState, kept_rows
from esscher.models.probe.layer import LayerState
from esscher.models.probe.queries import Context, LayerQueries, QueryCollector
from esscher.models.probe.statistics import Block, Start, Statistic, statistics_of
from esscher.models.probe.tokens import LayerMoments, Rows, scores_of
from esscher.models.probe.window import Seen, Window

__all__ = ["sequence_state"]

FEWEST = 16  # keys a context must have
FIRST = 0  # the head whose mask says what a query sees: groups of queries are those of all heads


class Group(NamedTuple):
    """Queries, by their numbers, that see the same keys of a context, and these keys; ``place``: of it among all contexts."""

    place: int
    context: Context
    numbers: Indices
    keys: Tensor


def sequence_state(probe: ProbeContext, layer: int) -> tuple[LayerState, Indices]:
    """The state of a layer whose queries each look at their own context, and which of the probe's queries it has.

    ``keys`` is the mean number of keys that these see.
    """
    collector = QueryCollector(probe, contexts=True)
    moments: list[LayerMoments] = []

    def sink(captured: Captured, batch: Indices) -> None:
        collector(captured, batch)
        masks = probe.pooled, probe.windows.special
        moments.append(
            LayerMoments.of(Rows.of(captured, *(torch.from_numpy(mask[batch]).to(captured.query.device) for mask in masks)))
        )

    probe.run(np.unique(probe.places.windows), [layer], sink)
    queries = collector.result(layer)
    total = moments[0]
    for more in moments[1:]:
        total = total.merge(more)
    sizes = np.concatenate([context.allowed_to(FIRST).sum(1).cpu().numpy() for context in queries.contexts])
    used = np.flatnonzero(sizes >= FEWEST)
    known = _heads(probe, queries, used, int(sizes.max()))
    seen = sizes[used] if used.size else sizes
    info = replace(queries.info, note=_note(queries.info.note, len(sizes) - used.size, len(sizes)))
    return LayerState(info, total, known, round(float(seen.mean()))), used


def _note(note: str, short: int, asked: int) -> str:
    """What the pool leaves out, and how many queries are."""
    few = f"{short} of {asked} queries see fewer than {FEWEST} keys and are left out" if short else ""
    return "; ".join(part for part in (note, few) if part)


def _heads(probe: ProbeContext, queries: LayerQueries, used: Indices, most: int) -> dict[int, HeadState | str]:
    """The states of every head. Heads that share keys come one after the other: what keep rules cost them is found once."""
    layer, statistics = queries.info.layer, statistics_of(probe.spec)
    groups = [
        Group(place, context, context.rows[members], keys)
        for place, context in enumerate(queries.contexts)
        for members, keys in _groups(context)
        if len(keys) >= FEWEST
    ]
    if not groups:
        return dict.fromkeys(probe.heads(layer), f"no query sees {FEWEST} keys, at most {most} of them; use longer windows")
    asked = used[kept_rows(len(used), probe.spec.kept_queries).numpy()]
    heads: dict[int, HeadState | str] = {}
    for kv_head, sharing in groupby(probe.heads(layer), queries.info.kv_head):
        windows = _windows(probe, queries, kv_head)
        for head in sharing:
            try:
                parts = [_group(statistics, queries, group, head, asked, windows[group.place]) for group in groups]
                heads[head] = head_state.stack(parts, [torch.from_numpy(group.numbers) for group in groups])
            except ValueError as reason:
                heads[head] = str(reason)
    return heads


def _groups(context: Context) -> list[tuple[Indices, Tensor]]:
    """Queries of a window that see the same keys, and these keys."""
    patterns, of = torch.unique(context.allowed_to(FIRST), dim=0, return_inverse=True)
    return [(np.flatnonzero((of == i).cpu().numpy()), patterns[i].nonzero()[:, 0]) for i in range(len(patterns))]


def _windows(probe: ProbeContext, queries: LayerQueries, kv_head: int) -> list[Window | None]:
    """Contexts for keep rules, where the probe compares some: whole ones, as queries of a window decide together, evenly
    spread, as many as hold the queries that errors of kept keys are asked of; None for the others.
    """
    rules = [parse(text) for text in probe.spec.compared]
    windows: list[Window | None] = [None] * len(queries.contexts)
    long = [i for i, context in enumerate(queries.contexts) if int(context.allowed_to(FIRST).sum(1).max()) >= FEWEST]
    share = min(1.0, probe.spec.kept_queries / len(probe.places))
    for place in kept_rows(len(long), math.ceil(share * len(long))).tolist() if rules else ():
        context = queries.contexts[long[place]]
        allowed = context.allowed_to(FIRST)
        enough = allowed.sum(1) >= FEWEST
        rows = context.rows[enough.cpu().numpy()]
        seen = Seen(rows, probe.places.positions[rows], allowed[enough])
        windows[long[place]] = Window(queries, context.k[kv_head], context.v[kv_head], kv_head, seen, rules)
    return windows


def _group(
    statistics: tuple[Statistic, ...], queries: LayerQueries, group: Group, head: int, asked: Indices, window: Window | None
) -> HeadState:
    """The states of queries that share one context; those asked for are the kept ones."""
    context, numbers, keys = group.context, group.numbers, group.keys
    own, rows = queries.info.kv_head(head), torch.from_numpy(numbers).to(queries.q.device)
    q, k, v = queries.q[head, rows], context.k[own, keys], context.v[own, keys]
    kept = torch.from_numpy(np.flatnonzero(np.isin(numbers, asked)))
    start = Start(kept, queries.sink_mass[head, rows], len(keys), v.double().mean(0), q.dtype)
    by_rule = None if window is None else partial(window.errors, head, numbers)
    block = Block(scores_of(queries.info, q, k), q, k, v, keys, kept, by_rule=by_rule)
    return head_state.update(head_state.init(statistics, start), block)
