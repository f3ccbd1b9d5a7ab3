"""A probe as a run: its units of work, what each computes, and the final tables."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.compute as compute_arrow
import torch

from esscher.errors.more_text import PIECES
from esscher.hf.call import AttentionCall
from esscher.hf.capture import parity
from esscher.probe.agreement import agreement_table
from esscher.probe.budget import budget_table, gradients_of, random_frontier
from esscher.probe.checks import context_of
from esscher.probe.layer import (
    LayerState,
    add_head,
    add_keys,
    add_moments,
    begin,
    layer_from_rows,
    layer_rows,
    merge_layers,
)
from esscher.probe.looks import looks
from esscher.probe.moment_stream import moment_units, stream_moments, with_moments
from esscher.probe.moments import Sampled, moment_curves, moment_ladder
from esscher.probe.own_context import compared, join_windows, whole_layer, window_states
from esscher.probe.queries import LayerQueries, QueryCollector, capture_queries
from esscher.probe.session import Indices, Mode, ProbeContext
from esscher.probe.spec import ProbeSpec
from esscher.probe.statistics.base import Failure
from esscher.probe.statistics.registry import check_registered
from esscher.probe.tables import Tables, columns, failed_row, layer_tables
from esscher.probe.tokens import LayerInfo, LayerMoments, Rows
from esscher.runs import Job, Shard, Unit


@dataclass(frozen=True)
class PooledLayer:
    """All pooled tokens of a layer; ``rows.q`` is empty unless the spec asks for moments."""

    queries: LayerQueries
    moments: LayerMoments
    rows: Rows


def hold(context: ProbeContext) -> dict[int, PooledLayer]:
    """Queries, moments and pooled tokens of every layer from one pass over the corpus."""
    collector = QueryCollector(context)
    moments: dict[int, LayerMoments] = {}
    parts: dict[int, list[Rows]] = {}

    def sink(captured: AttentionCall, batch: Indices) -> None:
        collector(captured, batch)
        layer, rows = captured.layer, _rows(context, captured, batch)
        own = LayerMoments.of(rows)
        moments[layer] = moments[layer].merge(own) if layer in moments else own
        q = rows.q if context.spec.moments else rows.q[:, :0]
        parts.setdefault(layer, []).append(
            Rows(q, rows.k, rows.v, rows.positions, None, pieces=rows.pieces)
        )

    (windows,) = context.parts
    context.run(windows, context.layers, sink)
    found = {}
    for layer in context.layers:
        q, k, v = (
            torch.cat([getattr(rows, name) for rows in parts[layer]], dim=1)
            for name in ("q", "k", "v")
        )
        positions = torch.cat([rows.positions for rows in parts[layer]])
        pieces = torch.cat([rows.pieces for rows in parts.pop(layer) if rows.pieces is not None])
        found[layer] = PooledLayer(
            collector.result(layer), moments[layer], Rows(q, k, v, positions, None, pieces=pieces)
        )
    return found


def stream(context: ProbeContext, layers: Sequence[int], windows: Indices) -> list[LayerState]:
    """The states of some layers over some windows; nothing is kept of a block once the states have
    seen it.
    """
    queries = context.once(capture_queries, tuple(layers))
    states: dict[int, LayerState] = {}

    def sink(captured: AttentionCall, batch: Indices) -> None:
        layer, rows = captured.layer, _rows(context, captured, batch)
        state = states[layer] if layer in states else begin(context, queries[layer], rows)
        states[layer] = add_keys(add_moments(state, rows), queries[layer], rows)

    context.run(windows, layers, sink)
    return [states[layer] for layer in layers]


def _rows(context: ProbeContext, captured: AttentionCall, batch: Indices) -> Rows:
    masks = context.pooled, context.windows.special, context.pieces
    return Rows.of(
        captured, *(torch.from_numpy(mask[batch]).to(captured.query.device) for mask in masks)
    )


# ---- A probe as a run: its units of work, what each computes, and the final tables.

STATE = 2.0e9  # bytes of states that a unit may hold
CELLS = 300  # cells of a score grid, for that estimate
RULE = 0.2  # what a keep rule takes of a window's queries, in all that else is measured of them
LAYERS = 6  # whose states are held while the final tables are made
HEADS = 4  # heads of a unit of work, where the tokens of all layers are held


def units(spec: ProbeSpec) -> list[Unit]:
    """A window each where it is the pool of its own queries; a few heads of a layer each where all
    tokens can be held; a layer each where the corpus is one part; else some layers over one part.
    States of windows and of parts meet at the end. Moments of tokens that are not held have units
    of their own.
    """
    check_registered(spec)
    context = context_of(spec, starts=True)
    if context.mode is Mode.OWN:
        return [{"window": window} for window in np.unique(context.places.windows).tolist()]
    streamed = moment_units(context) if spec.moments and context.mode is not Mode.HELD else []
    if context.mode is Mode.PARTS:
        blocks = layer_blocks(context)
        return [
            {"layers": block, "part": part}
            for block in blocks
            for part in range(len(context.parts))
        ] + streamed
    if context.mode is Mode.HELD and not spec.moments:
        return [
            {"layers": [layer], "part": 0, "heads": heads}
            for layer in context.layers
            for heads in _groups(context, layer)
        ]
    return [{"layers": [layer], "part": 0} for layer in context.layers] + streamed


def _groups(context: ProbeContext, layer: int) -> list[list[int]]:
    """The heads of a layer, a few at a time."""
    heads = context.heads(layer)
    return [list(heads[start : start + HEADS]) for start in range(0, len(heads), HEADS)]


def state_bytes(context: ProbeContext, layer: int) -> int:
    """Bytes of a layer's states, about."""
    # grids of kept keys are twice as fine, and wider; pieces have their own
    queries = len(context.places) + (3 + PIECES) * context.spec.kept_queries
    width = context.loaded.shapes[layer].value_width
    return len(context.heads(layer)) * queries * (width + 2) * CELLS * 8


def layer_blocks(context: ProbeContext) -> list[list[int]]:
    """Layers whose states fit into memory together; each block is one more forward pass over the
    corpus.
    """
    sizes = [state_bytes(context, layer) for layer in context.layers]
    blocks: list[list[int]] = [[]]
    held = 0
    for layer, size in zip(context.layers, sizes, strict=True):
        if blocks[-1] and held + size > STATE:
            blocks.append([])
            held = 0
        blocks[-1].append(layer)
        held += size
    return blocks


def concrete(spec: ProbeSpec) -> ProbeSpec:
    """With the pool that suits the model."""
    check_registered(spec)
    return spec if spec.pool != "auto" else context_of(spec).spec


def cost(spec: ProbeSpec, unit: Unit) -> float:
    """A window in which keep rules are compared takes more than the others."""
    here = bool(spec.compared) and unit["window"] in compared(context_of(spec))
    return 1.0 + RULE * len(spec.compared) if here else 1.0


def hashes(spec: ProbeSpec) -> dict[str, str]:
    context = context_of(spec)
    return {"model": context.loaded.sha256, "corpus": context.windows.sha256}


def compute(spec: ProbeSpec, unit: Unit) -> Mapping[str, Any]:
    """The finished tables of one layer or some of its heads, or the states of some layers over one
    part.
    """
    context = context_of(spec)
    return (
        stream_moments(context, unit) if "moments" in unit else COMPUTE[context.mode](context, unit)
    )


def _own(context: ProbeContext, unit: Unit) -> Mapping[str, Any]:
    """Settled states of every layer, for the queries of one window."""
    rows: list[dict[str, Any]] = []
    # bytes are small
    window_states(context, unit["window"], lambda state: rows.extend(layer_rows(state)))
    return {"states": _columns(rows)}


def _part(context: ProbeContext, unit: Unit) -> Mapping[str, Any]:
    states = stream(context, unit["layers"], context.parts[unit["part"]])
    rows: list[dict[str, Any]] = []
    while states:
        rows += layer_rows(states.pop(0))  # gone from memory once it is bytes
    return {"states": _columns(rows)}


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _layer(context: ProbeContext, unit: Unit) -> Mapping[str, Any]:
    (state,) = stream(context, unit["layers"], context.parts[0])
    return _finish(context, state).finished()


def _held(context: ProbeContext, unit: Unit) -> Mapping[str, Any]:
    """Heads of a layer whose tokens are in memory, one at a time: a state is small, but there are
    many heads.
    """
    spec, (layer,) = context.spec, unit["layers"]
    pooled = context.once(hold)[layer]
    queries, rows = pooled.queries, pooled.rows
    empty = replace(begin(context, queries, rows), moments=pooled.moments, keys=rows.k.shape[1])
    wanted = unit.get("heads", context.heads(layer))
    heads = (
        (head, add_head(empty.heads[head], queries, head, rows, whole=True)) for head in wanted
    )
    sampled = _sampled(context, pooled) if spec.moments else None
    tables = layer_tables(spec, empty, context.maps[layer], context.places, heads, sampled)
    if wanted[0] != context.heads(layer)[0]:
        tables.layers.clear()  # the layer's row comes with its first heads
    return tables.finished()


COMPUTE = {Mode.HELD: _held, Mode.LAYERS: _layer, Mode.PARTS: _part, Mode.OWN: _own}


def _finish(context: ProbeContext, state: LayerState) -> Tables:
    return layer_tables(context.spec, state, context.maps[state.info.layer], context.places)


def _sampled(context: ProbeContext, pooled: PooledLayer) -> dict[tuple[int, str], Sampled]:
    """Monte Carlo errors of the outputs' moments of a layer."""
    spec, info, rows = context.spec, pooled.queries.info, pooled.rows
    n = moment_ladder(spec.moments_n, rows.k.shape[1])
    return moment_curves(
        info, (rows.q, rows.k, rows.v), context.heads(info.layer), n, spec.moments, spec.seed
    )


def measure_piece(context: ProbeContext, unit: Unit, *, tables: bool = True) -> tuple[float, float]:
    """Processor time of one unit of work, and of the tables made of a window."""
    start = time.process_time()
    if context.mode is not Mode.OWN:
        COMPUTE[context.mode](context, unit)
        return time.process_time() - start, 0.0
    states: list[LayerState] = []
    window_states(context, unit["window"], states.append)
    measured = time.process_time()
    for state in states if tables else ():
        _finish(context, whole_layer(context, state)).finished()
    return measured - start, time.process_time() - measured


def consolidate(spec: ProbeSpec, shards: Sequence[Shard]) -> Mapping[str, Any]:
    """The final tables: parts of the corpus merged, heads in order, those that failed named,
    budgets, and what was run.
    """
    context = context_of(spec)
    sampled: list[Shard] = []
    if context.mode in (Mode.PARTS, Mode.OWN):
        parts = _joined(context, shards, sampled)
    else:
        parts = _side_by_side(_without(sampled, shards))
    parts["heads"] = _with_missing(context, parts.get("heads", pd.DataFrame()))
    if sampled:
        parts = with_moments(parts, _side_by_side(sampled))
    frontier = parts.get("frontier", pd.DataFrame())
    if not len(frontier) and "curves" in parts:
        frontier = random_frontier(parts["heads"], parts["curves"])
    if len(frontier) and np.isfinite(frontier["relative"]).any():
        asked = [(epsilon, None) for epsilon in spec.epsilons]
        parts["budget"] = budget_table(frontier, asked, gradients_of(parts["heads"]))
    if spec.moments and len(agreement := agreement_table(parts, columns(spec)["heads"], spec.seed)):
        parts["agreement"] = agreement
    parts["heads"], parts["looks"] = _with_looks(context, parts["heads"])
    parts["about"] = about(context, parts["heads"])
    return parts


def _with_looks(context: ProbeContext, heads: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The heads with their sinks, and which tokens they look at; none of a head that was not
    measured.
    """
    sinks, rows = looks(context)
    measured = heads.loc[heads["status"] == "ok", ["layer", "head"]]
    sinks, rows = (measured.merge(frame, on=["layer", "head"]) for frame in (sinks, rows))
    heads = heads.merge(sinks, on=["layer", "head"], how="left").fillna({"sink_token": ""})
    order = [column.key for column in columns(context.spec)["heads"] if column.key in heads]
    return heads[[*order, *(key for key in heads if key not in order)]], rows


def _without(sampled: list[Shard], shards: Iterable[Shard]) -> Iterator[Shard]:
    """The shards one at a time, but for those of moments, which are small and go to the list."""
    for shard in shards:
        if "moments" in shard.unit:
            sampled.append(shard)
        else:
            yield shard


def _side_by_side(shards: Iterable[Shard]) -> dict[str, pd.DataFrame]:
    frames: dict[str, list[pd.DataFrame]] = {}
    for shard in shards:
        for name, table in shard.tables.items():
            frames.setdefault(name, []).append(table.to_pandas())
    return {name: pd.concat(rows, ignore_index=True) for name, rows in frames.items()}


def _joined(
    context: ProbeContext, shards: Sequence[Shard], sampled: list[Shard]
) -> dict[str, pd.DataFrame]:
    """Tables of layers whose states, of parts or of windows, are all there. Shards of moments go to
    the list.

    One shard is in memory at a time, and the states of few layers: a window has those of all, and
    is read again for every few.
    """
    layers = list(context.layers)
    few = LAYERS if context.mode is Mode.OWN else len(layers)
    finished: dict[str, list[pd.DataFrame]] = {"heads": [], "layers": []}
    for start in range(0, len(layers), few):
        sampled.clear()
        for state in _whole(context, layers[start : start + few], _without(sampled, shards)):
            for name, frame in _finish(context, state).finished().items():
                finished.setdefault(name, []).append(frame)
    return {
        name: pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
        for name, frames in finished.items()
    }


def _whole(
    context: ProbeContext, layers: Sequence[int], shards: Iterable[Shard]
) -> Iterator[LayerState]:
    """The states of these layers over all parts or windows, each as soon as its last piece was
    read.
    """
    own = context.mode is Mode.OWN
    pieces = len(np.unique(context.places.windows)) if own else len(context.parts)
    join = join_windows if own else merge_layers
    states: dict[int, LayerState] = {}
    seen: Counter[int] = Counter()
    for shard in shards:
        table = shard.tables["states"]
        for layer in layers if own else shard.unit["layers"]:
            rows = table.filter(compute_arrow.equal(table["layer"], layer)).to_pylist()
            part = layer_from_rows(context.spec, rows, settled=own)
            states[layer] = join(states[layer], part) if layer in states else part
            seen[layer] += 1
            if seen[layer] == pieces:
                state = states.pop(layer)
                yield whole_layer(context, state) if own else state
                del state
        del table, rows, part


def _with_missing(context: ProbeContext, heads: pd.DataFrame) -> pd.DataFrame:
    """A row for every head that was asked for: one that has no result says so."""
    known = set(zip(heads["layer"], heads["head"], strict=True)) if len(heads) else set()
    reason = "the piece of work that holds this head failed; the manifest has the reason"
    rows = []
    for layer in context.layers:
        shape = context.loaded.shapes[layer]
        info = LayerInfo(layer, shape.heads, shape.kv_heads, 1.0, None, "")
        missing = [head for head in context.heads(layer) if (layer, head) not in known]
        rows += [
            failed_row(context.spec, Failure(info, head, reason, context.keys, len(context.places)))
            for head in missing
        ]
    if rows:
        heads = (
            pd.concat([heads, pd.DataFrame(rows)], ignore_index=True)
            if len(heads)
            else pd.DataFrame(rows)
        )
    return heads.sort_values(["layer", "head"], ignore_index=True)


def about(context: ProbeContext, heads: pd.DataFrame) -> pd.DataFrame:
    """One row: the model and the text as they were measured, and the parity of the captured model
    with the plain one.

    ``output_difference``: largest of all heads, between their limits and the model's own outputs,
    where these are the same.
    """
    loaded, windows, same = context.loaded, context.windows, parity(context.loaded.model)
    corpus = context.spec.corpus
    text = ", ".join(corpus.text) or corpus.dataset or f"packaged {corpus.packaged}"
    return pd.DataFrame(
        [
            {
                "model": loaded.name,
                "model_sha256": loaded.sha256,
                "weights": loaded.weights,
                "layers": loaded.layers,
                "heads": loaded.heads,
                "kv_heads": loaded.kv_heads,
                "width": loaded.width,
                "causal": loaded.causal,
                "parity": same.max_difference,
                "parity_relative": same.relative,
                "captured_layers": same.captured,
                "output_difference": (
                    float(heads["output_difference"].max())
                    if "output_difference" in heads
                    else math.nan
                ),
                "text": text,
                "corpus_sha256": windows.sha256,
                "documents": windows.documents,
                "tokens": windows.tokens,
                "window": windows.length,
                "windows": len(windows),
                "pool": context.spec.pool,
                "keys": context.keys,
                "queries": len(context.places),
            }
        ]
    )


PROBE = Job("probe", ProbeSpec, units, compute, consolidate, hashes, columns, concrete, cost)
