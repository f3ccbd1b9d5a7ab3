"""A query's real context as its pool: the keys of its own window that the mask allows it to see.

Contexts differ in their number of keys, a causal query's with its place. Every query that sees FEWEST keys is used, with its
own number of them: keys are kept at one fraction of each context.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from esscher.models.huggingface.capture import Captured
from esscher.models.probe import head as head_state
from esscher.models.probe.context import Indices, ProbeContext
from esscher.models.probe.head import HeadState, kept_rows
from esscher.models.probe.layer import LayerState
from esscher.models.probe.queries import Context, LayerQueries, QueryCollector
from esscher.models.probe.statistics import Block, Start, Statistic, statistics_of
from esscher.models.probe.tokens import LayerMoments, Rows, scores_of

__all__ = ["sequence_state"]

FEWEST = 16  # keys a context must have
FIRST = 0  # the head whose mask says what a query sees: groups of queries are those of all heads

Group = tuple[Context, Indices, Tensor]  # queries, by their place in the context, that see the same keys, and these keys


def sequence_state(probe: ProbeContext, layer: int) -> tuple[LayerState, Indices]:
    """The state of a layer whose queries each look at their own context, and which of the probe's queries it has.

    ``keys`` is the mean number of keys that these see.
    """
    collector = QueryCollector(probe, contexts=True)
    moments: list[LayerMoments] = []

    def sink(captured: Captured, batch: Indices) -> None:
        collector(captured, batch)
        pooled = torch.from_numpy(probe.pooled[batch]).to(captured.query.device)
        moments.append(LayerMoments.of(Rows.of(captured, pooled)))

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
    heads: dict[int, HeadState | str] = {}
    asked = used[kept_rows(len(used), probe.spec.kept_queries).numpy()]
    groups: list[Group] = [(c, members, keys) for c in queries.contexts for members, keys in _groups(c) if len(keys) >= FEWEST]
    statistics = statistics_of(probe.spec)
    for head in probe.heads(queries.info.layer):
        try:
            if not groups:
                raise ValueError(f"no query sees {FEWEST} keys, at most {most} of them; use longer windows")
            numbers = [torch.from_numpy(context.rows[members]) for context, members, _ in groups]
            parts = [_group(statistics, queries, group, head, asked) for group in groups]
            heads[head] = head_state.stack(parts, numbers)
        except ValueError as reason:
            heads[head] = str(reason)
    return heads


def _groups(context: Context) -> list[tuple[Indices, Tensor]]:
    """Queries of a window that see the same keys, and these keys."""
    patterns, of = torch.unique(context.allowed_to(FIRST), dim=0, return_inverse=True)
    return [(np.flatnonzero((of == i).cpu().numpy()), patterns[i].nonzero()[:, 0]) for i in range(len(patterns))]


def _group(statistics: tuple[Statistic, ...], queries: LayerQueries, group: Group, head: int, asked: Indices) -> HeadState:
    """The states of queries that share one context; those asked for are the kept ones."""
    context, members, keys = group
    numbers = context.rows[members]
    own, rows = queries.info.kv_head(head), torch.from_numpy(numbers).to(queries.q.device)
    q, k, v = queries.q[head, rows], context.k[own, keys], context.v[own, keys]
    kept = torch.from_numpy(np.flatnonzero(np.isin(numbers, asked)))
    start = Start(kept, queries.sink_mass[head, rows], len(keys), v.double().mean(0), q.dtype)
    return head_state.update(head_state.init(statistics, start), Block(scores_of(queries.info, q, k), q, k, v, keys, kept))
