"""What is known of one layer while its tokens stream by: moments of its tokens, and the states of
each head.

A layer's queries are captured first (esscher.models.probe.queries); then every block of keys and
values updates the states. Parts of a corpus have states of their own, which merge.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from esscher.models.huggingface.call import score
from esscher.models.probe import head as head_state
from esscher.models.probe.context import ProbeContext
from esscher.models.probe.head import HeadState, kept_rows
from esscher.models.probe.packing import pack, unpack
from esscher.models.probe.queries import LayerQueries
from esscher.models.probe.spec import ProbeSpec
from esscher.models.probe.statistics import Block, Start, statistics_of
from esscher.models.probe.tokens import LayerInfo, LayerMoments, Rows
from esscher.models.probe.wide import Held

__all__ = [
    "LayerState",
    "add_head",
    "add_keys",
    "add_moments",
    "begin",
    "layer_from_rows",
    "layer_rows",
    "merge_layers",
]

KEY_BLOCK = 8192


@dataclass(frozen=True)
class LayerState:
    """Moments and heads of a layer over the keys seen so far; a head that could not go on has the
    reason instead.

    ``keys``: how many a query sees; on average, and as foreseen, where each has a context of its
    own.
    """

    info: LayerInfo
    moments: LayerMoments
    heads: dict[int, HeadState | str]
    keys: int = 0


# ---- keys
# ------------------------------------------------------------------------------------------


def begin(source: ProbeContext, queries: LayerQueries, rows: Rows) -> LayerState:
    """The state of a layer before its first block of rows; the block says where the values lie."""
    statistics, kept = (
        statistics_of(source.spec),
        kept_rows(queries.q.shape[1], source.spec.kept_queries),
    )
    heads: dict[int, HeadState | str] = {}
    for head in source.heads(queries.info.layer):
        center = rows.v[queries.info.kv_head(head)].double().mean(0)
        start = Start(kept, queries.sink_mass[head], source.keys, center, rows.q.dtype)
        heads[head] = head_state.init(statistics, start)
    return LayerState(queries.info, LayerMoments.of(rows.none()), heads)


def add_moments(state: LayerState, rows: Rows) -> LayerState:
    return replace(state, moments=state.moments.merge(LayerMoments.of(rows)))


def add_keys(state: LayerState, queries: LayerQueries, rows: Rows) -> LayerState:
    """The state after keys and values have met the queries of every head."""
    heads = {head: add_head(known, queries, head, rows) for head, known in state.heads.items()}
    return replace(state, heads=heads, keys=state.keys + rows.k.shape[1])


def add_head(
    known: HeadState | str, queries: LayerQueries, head: int, rows: Rows, *, whole: bool = False
) -> HeadState | str:
    """One head's state after keys and values, or the reason why it has none. ``whole``: they are
    all there will be.
    """
    info, q = queries.info, queries.q[head]
    own = info.kv_head(head)
    pool = None
    if whole and info.softcap is None:  # a cap keeps scores on the grid
        pool = Held(q, rows.k[own], rows.v[own], info.scale)
    try:
        for start in range(0, rows.k.shape[1], KEY_BLOCK):
            if not isinstance(known, str):
                some = slice(start, start + KEY_BLOCK)
                k, v = rows.k[own, some], rows.v[own, some]
                hidden, pieces = (
                    None if x is None else x[some] for x in (rows.hidden, rows.pieces)
                )
                scores, positions = score(q, k, info.scale, info.softcap), rows.positions[some]
                block = Block(scores, q, k, v, positions, known.kept, hidden, pool, pieces=pieces)
                known = head_state.update(known, block)
    except ValueError as reason:
        return str(reason)
    return known


def merge_layers(a: LayerState, b: LayerState) -> LayerState:
    """The state over the union of two disjoint sets of keys."""
    heads: dict[int, HeadState | str] = {}
    for head, known in a.heads.items():
        other = b.heads[head]
        heads[head] = (
            known
            if isinstance(known, str)
            else other
            if isinstance(other, str)
            else head_state.merge(known, other)
        )
    return replace(a, moments=a.moments.merge(b.moments), heads=heads, keys=a.keys + b.keys)


# ---- bytes
# ------------------------------------------------------------------------------------------


def layer_rows(state: LayerState) -> list[dict[str, Any]]:
    """The state as rows of a table: one for the layer itself (head -1) and one for each head."""
    layer = state.info.layer
    itself = pack({"info": state.info, "moments": state.moments, "keys": state.keys})
    rows = [{"layer": layer, "head": -1, "reason": "", "state": itself}]
    for head, known in state.heads.items():
        reason, data = (known, b"") if isinstance(known, str) else ("", head_state.to_bytes(known))
        rows.append({"layer": layer, "head": head, "reason": reason, "state": data})
    return rows


def layer_from_rows(
    spec: ProbeSpec, rows: list[dict[str, Any]], *, settled: bool = False
) -> LayerState:
    """The state of one layer from its rows; ``settled``: those of its heads are."""
    statistics = statistics_of(spec)
    (itself,) = (row["state"] for row in rows if row["head"] == -1)
    known = unpack(itself, {"info": LayerInfo, "moments": LayerMoments, "keys": int})
    heads: dict[int, HeadState | str] = {}
    for row in rows:
        if row["head"] >= 0:
            data = row["state"]
            heads[row["head"]] = (
                head_state.from_bytes(data, statistics, settled=settled) if data else row["reason"]
            )
    return LayerState(known["info"], known["moments"], heads, known["keys"])
