"""A query's real context as its pool: the keys of its own window that the mask allows it to see."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from torch import Tensor

from esscher.convergence.deposit import Deposit
from esscher.diagnostics.tails import TopScores, tail_length
from esscher.models import head_state
from esscher.models.capture import Captured
from esscher.models.head_state import HeadState
from esscher.models.layer_state import (
    Context,
    LayerMoments,
    LayerQueries,
    LayerState,
    QueryCollector,
    Rows,
    scores_of,
)
from esscher.models.source import Indices, TokenSource

__all__ = ["sequence_state"]

FEWEST = 16  # keys a context must have


def sequence_state(source: TokenSource, layer: int) -> LayerState:
    """The state of a layer whose queries each look at their own context.

    ``keys`` is the number of keys that most queries see; only these queries have errors of kept keys.
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
    heads: dict[int, HeadState | str] = {}
    for head in source.heads(layer):
        try:
            heads[head] = _head(source, queries, head)
        except ValueError as reason:
            heads[head] = str(reason)
    return LayerState(queries.info, total, heads, queries.sink_mass, _usual(queries))


def _usual(queries: LayerQueries) -> int:
    """The number of keys that most queries see."""
    sizes = Counter(int(size) for context in queries.contexts for size in context.allowed.sum(1))
    return max(sizes, key=lambda size: (sizes[size], size))


def _head(source: TokenSource, queries: LayerQueries, head: int) -> HeadState:
    """States of groups of queries with one context each, stacked."""
    usual = _usual(queries)
    fewest = min(int(context.allowed.sum(1).min()) for context in queries.contexts)
    if fewest < FEWEST:
        raise ValueError(f"a query sees {fewest} keys only, at least {FEWEST} are needed; use longer windows")
    drawn, kept, top, rows = [], [], [], []
    asked = set(head_state.kept_rows(len(source.places), source.spec.kept_queries).tolist())
    for context in queries.contexts:
        for members, keys in _groups(context):
            numbers = context.rows[members]
            state = _group(queries, context, head, torch.from_numpy(numbers), keys, tail_length(fewest) + 1)
            drawn.append(state.drawn)
            chosen = [place for place, number in enumerate(numbers.tolist()) if number in asked]
            if chosen:
                top.append(state.top.scores[chosen])
            if state.kept is not None and chosen and state.keys == usual:
                kept.append(_take(state.kept, chosen))
                rows += [int(numbers[place]) for place in chosen]
    order = torch.from_numpy(np.argsort(np.concatenate([c.rows[m] for c in queries.contexts for m, _ in _groups(c)])))
    whole = head_state.stack(drawn)
    whole = Deposit(whole.grid, whole.center, whole.cells[:, order], whole.first[order], whole.end[order], usual)
    scores = torch.cat(top)
    return HeadState(
        drawn=whole,
        kept=head_state.stack(kept) if kept else None,
        top=TopScores(scores.shape[1], usual, scores),
        rows=torch.tensor(rows, dtype=torch.int64),
    )


def _groups(context: Context) -> list[tuple[Indices, Tensor]]:
    """Queries of a window that see the same keys, and these keys."""
    patterns, of = torch.unique(context.allowed, dim=0, return_inverse=True)
    return [(np.flatnonzero((of == i).cpu().numpy()), patterns[i].nonzero()[:, 0]) for i in range(len(patterns))]


def _group(queries: LayerQueries, context: Context, head: int, numbers: Tensor, keys: Tensor, tail: int) -> HeadState:
    own = queries.info.kv_head(head)
    q, k, v = queries.q[head, numbers.to(queries.q.device)], context.k[own, keys], context.v[own, keys]
    state = head_state.init(len(q), len(q), tail, v.double().mean(0), q.dtype)
    return head_state.update(state, scores_of(queries.info, q, k), v)


def _take(state: Deposit, rows: list[int]) -> Deposit:
    return Deposit(state.grid, state.center, state.cells[:, rows], state.first[rows], state.end[rows], state.keys)
