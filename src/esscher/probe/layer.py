"""What is known of one layer while its tokens stream by: moments of its tokens, and the states of
each head.

A layer's queries are captured first (esscher.probe.queries); then every block of keys and
values updates the states. Parts of a corpus have states of their own, which merge.
"""

from __future__ import annotations

import json
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Union, get_args, get_origin, get_type_hints

import pandas as pd
import torch
from safetensors.torch import load, save
from torch import Tensor

from esscher.hf.call import score
from esscher.probe.queries import LayerQueries
from esscher.probe.rules import OVERFLOW
from esscher.probe.session import ProbeContext
from esscher.probe.spec import ProbeSpec
from esscher.probe.statistics.base import (
    Block,
    Findings,
    Found,
    Met,
    Order,
    Start,
    Statistic,
)
from esscher.probe.statistics.registry import statistics_of
from esscher.probe.tokens import LayerInfo, LayerMoments, Rows
from esscher.probe.wide import Held

TREE = "tree"  # places begin with a point, so that none is this one
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.bool,
    )
}


def pack(value: Any, single: Collection[str] = ()) -> bytes:
    """``single``: places of float64 tensors that are known no better than float32, and stored as
    that.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_tree("", value, tensors, frozenset(single)))
    _own_memory(tensors)
    tensors[TREE] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return save(tensors)


def unpack(data: bytes, kind: Any) -> Any:
    """``kind``: the class of what was packed, or classes by name where it was a mapping."""
    tensors = load(data)
    return _value("", json.loads(bytes(tensors[TREE].numpy())), kind, tensors)


def _tree(
    place: str, value: Any, tensors: dict[str, Tensor], single: frozenset[str]
) -> dict[str, Any]:
    if isinstance(value, Tensor):
        kind = {"tensor": str(value.dtype).removeprefix("torch.")}
        value = value.float() if place in single else value
        if _symmetric(value):
            upper = torch.triu_indices(*value.shape[-2:], device=value.device)
            value, kind = value[..., upper[0], upper[1]], kind | {"side": value.shape[-1]}
        tensors[place] = value.detach().cpu().contiguous()
        return kind
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {
            "of": {
                name: _tree(f"{place}.{name}", part, tensors, single)
                for name, part in value.items()
            }
        }
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    raise TypeError(
        f"{place[1:]}: expected a dataclass, a mapping, a tensor, a number, a word or None, got"
        f" {type(value).__name__}"
    )


def _symmetric(value: Tensor) -> bool:
    """To the last digit, of at least two rows."""
    square = value.ndim >= 2 and value.shape[-1] == value.shape[-2] > 1
    return square and torch.equal(value, value.transpose(-1, -2))


def _own_memory(tensors: dict[str, Tensor]) -> None:
    """safetensors refuses tensors that share theirs."""
    taken: set[int] = set()
    for place, value in tensors.items():
        where = value.untyped_storage().data_ptr()
        if where in taken:
            tensors[place] = value.clone()
        taken.add(where)


def _value(place: str, tree: dict[str, Any], kind: Any, tensors: dict[str, Tensor]) -> Any:
    if "tensor" in tree:
        found = tensors[place].to(DTYPES[tree["tensor"]])
        return _whole(found, tree["side"]) if "side" in tree else found
    if "plain" in tree:
        return tree["plain"]
    kind = _structure(kind)
    whole = is_dataclass(kind)
    kinds = (
        get_type_hints(kind)
        if whole
        else dict.fromkeys(tree["of"], get_args(kind)[1])
        if get_origin(kind) is dict
        else kind
    )
    parts = {
        name: _value(f"{place}.{name}", part, kinds[name], tensors)
        for name, part in tree["of"].items()
    }
    return kind(**parts) if whole else parts


def _whole(upper: Tensor, side: int) -> Tensor:
    """Symmetric matrices from their upper halves, row by row."""
    row, column = torch.triu_indices(side, side, device=upper.device)
    whole = upper.new_empty(*upper.shape[:-1], side, side)
    whole[..., row, column] = upper
    whole[..., column, row] = upper
    return whole


def _structure(kind: Any) -> Any:
    """What a mapping of parts is of: a dataclass, the one of an optional one, or kinds by name."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (option for option in get_args(kind) if is_dataclass(option))
    return kind


# ---- A head's states, one of each statistic, while keys stream by: init, update, merge, settle,
# stack, finish, bytes to store.

Statistics = tuple[Statistic, ...]


@dataclass(frozen=True)
class HeadState:
    """``states``: by name of their statistic, in the order of ``statistics``."""

    statistics: Statistics
    states: Mapping[str, Any]
    queries: Tensor  # (m,) int64: numbers of the head's queries among all of the probe's
    kept: Tensor  # (m_kept,) int64: places of the kept ones among these
    settled: bool = False


def kept_rows(queries: int, kept: int) -> Tensor:
    """The queries, evenly spread, that costly statistics are of."""
    return torch.linspace(0, queries - 1, min(kept, queries)).round().long()


def init(statistics: Statistics, start: Start, queries: Tensor | None = None) -> HeadState:
    """The states before any key; ``queries``: their numbers, by default 0 to m - 1."""
    numbers = torch.arange(start.queries) if queries is None else queries
    return HeadState(
        statistics,
        {statistic.name: statistic.init(start) for statistic in statistics},
        numbers,
        start.kept,
    )


def update(head: HeadState, block: Block) -> HeadState:
    """The states after one more block of keys; the old ones must not be used again. ValueError: the
    head cannot go on.
    """
    finite = (
        torch.isfinite(block.scores)
        if block.seen is None
        else torch.isfinite(block.scores) | ~block.seen
    )
    if not bool(finite.all()) or not bool(torch.isfinite(block.values).all()):
        raise ValueError(OVERFLOW)
    return replace(
        head,
        states={each.name: each.update(head.states[each.name], block) for each in head.statistics},
    )


def merge(a: HeadState, b: HeadState) -> HeadState:
    """The states over the union of two disjoint sets of keys, seen by the same queries."""
    return replace(
        a,
        states={
            each.name: each.merge(a.states[each.name], b.states[each.name]) for each in a.statistics
        },
    )


def settle(head: HeadState, met: Met, notes: dict[str, dict[str, Any]]) -> HeadState:
    """Every key was met: what is left of them. ``notes``: by name of statistic, from one head of a
    layer to the next.
    """
    if head.settled:
        return head
    states = {
        each.name: each.settle(
            head.states[each.name], replace(met, notes=notes.setdefault(each.name, {}))
        )
        for each in head.statistics
    }
    return replace(head, states=states, settled=True)


def stack(heads: Sequence[HeadState]) -> HeadState:
    """The settled states of different queries, each over its own keys, as one, in the order of
    their numbers.
    """
    every = torch.cat([head.queries for head in heads])
    kept = torch.cat([head.queries[head.kept] for head in heads])
    order = Order(every.argsort(), kept.argsort())
    states = {
        each.name: each.stack([head.states[each.name] for head in heads], order)
        for each in heads[0].statistics
    }
    queries = every.sort().values
    return replace(
        heads[0],
        states=states,
        queries=queries,
        kept=torch.searchsorted(queries, kept.sort().values),
    )


def finish(head: HeadState, known: Found) -> tuple[dict[str, Any], dict[str, list[pd.DataFrame]]]:
    """The row of a head whose states are settled, and its rows of long tables. ``known``: as the
    first statistic sees it.
    """
    found: dict[str, Findings] = {}
    row: dict[str, Any] = {}
    long: dict[str, list[pd.DataFrame]] = {}
    for statistic in head.statistics:
        reads = {name: found[name] for name in statistic.reads}
        own = replace(
            known,
            states={name: head.states[name] for name in reads},
            values={name: findings.value for name, findings in reads.items()},
            row={
                key: value for findings in reads.values() for key, value in findings.columns.items()
            },
        )
        found[statistic.name] = findings = statistic.finish(head.states[statistic.name], own)
        keys = [column.key for column in statistic.columns(known.spec)]
        _expect(statistic, "columns", findings.columns, keys)
        _expect(statistic, "tables", findings.tables, statistic.tables(known.spec))
        row |= {key: findings.columns[key] for key in keys}
        for table, rows in findings.tables.items():
            long.setdefault(table, []).append(rows)
    return row, long


def _expect(
    statistic: Statistic, what: str, given: Collection[str], declared: Collection[str]
) -> None:
    """Neither more nor less than what was declared: a mistake of the statistic, not of the head."""
    if set(given) != set(declared):
        raise TypeError(
            f"statistic {statistic.name}: declares the {what} {sorted(declared)}, gave"
            f" {sorted(given)}"
        )


def to_bytes(head: HeadState) -> bytes:
    single = [
        f".states.{each.name}{place}"
        for each in head.statistics
        for place in each.single(head.states[each.name])
    ]
    return pack({"states": head.states, "queries": head.queries, "kept": head.kept}, single)


def from_bytes(data: bytes, statistics: Statistics, *, settled: bool = False) -> HeadState:
    states = {
        each.name: (each.settled or each.state) if settled else each.state for each in statistics
    }
    return HeadState(
        statistics,
        **unpack(data, {"states": states, "queries": Tensor, "kept": Tensor}),
        settled=settled,
    )


# ---- What is known of one layer while its tokens stream by: moments of its tokens, and the
# states of each head.

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
        heads[head] = init(statistics, start)
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
                known = update(known, block)
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
            else merge(known, other)
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
        reason, data = (known, b"") if isinstance(known, str) else ("", to_bytes(known))
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
                from_bytes(data, statistics, settled=settled) if data else row["reason"]
            )
    return LayerState(known["info"], known["moments"], heads, known["keys"])
