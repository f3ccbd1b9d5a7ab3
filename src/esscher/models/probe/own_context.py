"""A query's real context as its pool: the keys of its own window that the mask allows it to see.

Contexts differ in their number of keys, a causal query's with its place. Every query that sees FEWEST keys is used, with its
own number of them: keys are kept at one fraction of each context.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from esscher.convergence.grid import state as deposit
from esscher.diagnostics import tails
from esscher.diagnostics.tails import TopScores, tail_length
from esscher.models.huggingface.capture import Captured
from esscher.models.probe import head as head_state
from esscher.models.probe.context import Indices, TokenSource
from esscher.models.probe.head import HeadState
from esscher.models.probe.layer import (
    Context,
    LayerMoments,
    LayerQueries,
    LayerState,
    QueryCollector,
    Rows,
    scores_of,
)

__all__ = ["sequence_state"]

FEWEST = 16  # keys a context must have

Group = tuple[Context, Indices, Tensor]  # queries, by their place in the context, that see the same keys, and these keys


def sequence_state(source: TokenSource, layer: int) -> tuple[LayerState, Indices]:
    """The state of a layer whose queries each look at their own context, and which of the source's queries it has.

    ``keys`` is the mean number of keys that these see.
    """
    collector = QueryCollector(source, contexts=True)
    moments: list[LayerMoments] = []

    def sink(captured: Captured, batch: Indices) -> None:
        collector(captured, batch)
        pooled = torch.from_numpy(source.pooled[batch]).to(captured.query.device)
        moments.append(LayerMoments.of(Rows.of(captured, pooled)))

    source.run(np.unique(source.places.windows), [layer], sink)
    queries = collector.result(layer)
    total = moments[0]
    for more in moments[1:]:
        total = total.merge(more)
    sizes = np.concatenate([context.allowed.sum(1).cpu().numpy() for context in queries.contexts])
    used = np.flatnonzero(sizes >= FEWEST)
    known = _heads(source, queries, used, int(sizes.max()))
    seen = sizes[used] if used.size else sizes
    info = replace(queries.info, note=_note(queries.info.note, len(sizes) - used.size, len(sizes)))
    return LayerState(info, total, known, queries.sink_mass[:, used], round(float(seen.mean()))), used


def _note(note: str, short: int, asked: int) -> str:
    """What the pool leaves out, and how many queries are."""
    few = f"{short} of {asked} queries see fewer than {FEWEST} keys and are left out" if short else ""
    return "; ".join(part for part in (note, few) if part)


def _heads(source: TokenSource, queries: LayerQueries, used: Indices, most: int) -> dict[int, HeadState | str]:
    heads: dict[int, HeadState | str] = {}
    asked = used[head_state.kept_rows(len(used), source.spec.kept_queries).numpy()]
    groups = [(c, members, keys) for c in queries.contexts for members, keys in _groups(c) if len(keys) >= FEWEST]
    for head in source.heads(queries.info.layer):
        try:
            if not groups:
                raise ValueError(f"no query sees {FEWEST} keys, at most {most} of them; use longer windows")
            heads[head] = _head(queries, groups, used, asked, head)
        except ValueError as reason:
            heads[head] = str(reason)
    return heads


def _head(queries: LayerQueries, groups: list[Group], used: Indices, asked: Indices, head: int) -> HeadState:
    """States of groups of queries with one context each, stacked in the order of the queries."""
    drawn, kept, top, numbers, rows = [], [], [], [], []
    for context, members, keys in groups:
        own = context.rows[members]
        state = _group(queries, context, head, torch.from_numpy(own), keys)
        drawn.append(state.drawn)
        numbers.append(own)
        chosen = np.flatnonzero(np.isin(own, asked))
        if chosen.size:
            kept.append(deposit.take(state.kept, torch.from_numpy(chosen)))
            top.append(TopScores(state.top.keep, state.top.count[chosen], state.top.scores[chosen]))
            rows.append(np.searchsorted(used, own[chosen]))
    order, among = (torch.from_numpy(np.argsort(np.concatenate(x))) for x in (numbers, rows))
    largest = tails.stack(top)
    return HeadState(
        drawn=deposit.take(head_state.stack(drawn), order),
        kept=deposit.take(head_state.stack(kept), among),
        top=TopScores(largest.keep, largest.count[among], largest.scores[among]),
        rows=torch.from_numpy(np.sort(np.concatenate(rows))),
    )


def _groups(context: Context) -> list[tuple[Indices, Tensor]]:
    """Queries of a window that see the same keys, and these keys."""
    patterns, of = torch.unique(context.allowed, dim=0, return_inverse=True)
    return [(np.flatnonzero((of == i).cpu().numpy()), patterns[i].nonzero()[:, 0]) for i in range(len(patterns))]


def _group(queries: LayerQueries, context: Context, head: int, numbers: Tensor, keys: Tensor) -> HeadState:
    own = queries.info.kv_head(head)
    q, k, v = queries.q[head, numbers.to(queries.q.device)], context.k[own, keys], context.v[own, keys]
    state = head_state.init(len(q), len(q), tail_length(len(keys)) + 1, v.double().mean(0), q.dtype)
    return head_state.update(state, scores_of(queries.info, q, k), v)
