"""A probe as a run: its units of work, what each computes, and the final tables."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.compute as compute_arrow

from esscher.hf.capture import parity
from esscher.hf.loading import Loaded
from esscher.probe.agreement import agreement_table
from esscher.probe.budget import budget_table, gradients_of, random_frontier
from esscher.probe.corpus import corpus_layer
from esscher.probe.measure import (
    LayerState,
    columns,
    failed_row,
    head_of,
    join,
    layer_from_rows,
    layer_rows,
    layer_tables,
)
from esscher.probe.moments import check_moments, moment_units, stream_moments, with_moments
from esscher.probe.own_context import window_layers
from esscher.probe.session import FEWEST, Session, open_session
from esscher.probe.spec import ProbeSpec, check_ladder
from esscher.probe.statistics.dispersion import check_dispersion
from esscher.probe.statistics.frontier import check_rules
from esscher.probe.statistics.registry import check_registered, statistics_of
from esscher.probe.statistics.shape import check_scales
from esscher.probe.tokens import LayerInfo
from esscher.runs import Job, Shard, Unit

LAYERS = 6  # whose states are held while the final tables are made
RULE = 0.2  # cost of a keep rule, in all else that is measured in a window


def check_asked(session: Session) -> None:
    """Refuse what this text and this model cannot give, before weights are read."""
    spec, most = session.spec, max(session.most_keys(layer) for layer in session.layers)
    if session.own and most < FEWEST:
        raise ValueError(
            f"text: no query sees {FEWEST} keys, {most} at most, so nothing can be measured; give"
            " a longer text, or longer windows (--window)"
        )
    check_ladder(spec, most)
    for check in (check_moments, check_rules, check_dispersion, check_scales):
        check(session)
    if session.own or len(session.parts) == 1:
        return
    for statistic in statistics_of(spec):
        if not statistic.streams and statistic.columns(spec):
            raise ValueError(
                f"statistics: {statistic.name} reads all keys at once, and the corpus comes in"
                f" {len(session.parts)} parts; raise --part, or let it stream (init, update, merge)"
            )


def open_probe(spec: ProbeSpec, loaded: Loaded | None = None) -> Session:
    """The session of a spec whose statistics are registered, with everything it asks for checked.

    ``loaded``: the model, where it is given as an object.
    """
    check_registered(spec)
    return open_session(spec, loaded, check_asked)


# ---- units


def units(session: Session) -> list[Unit]:
    """Those of the session; moments have units of their own."""
    return session.units + (moment_units(session) if session.spec.moments else [])


def cost(session: Session, unit: Unit) -> float:
    """A window in which keep rules are compared takes more than the others."""
    compared = session.spec.compared
    ruled = bool(compared) and unit["window"] in session.rule_windows
    return 1.0 + RULE * len(compared) if ruled else 1.0


def hashes(session: Session) -> dict[str, str]:
    return {"model": session.loaded.sha256, "corpus": session.windows.sha256}


def compute(session: Session, unit: Unit) -> Mapping[str, Any]:
    """Tables of some heads where the corpus is one part; else states, which are joined at the
    end. The first unit also compares the captured model with the plain one.
    """
    if "moments" in unit:
        return stream_moments(session, unit)
    found = unit_tables(session, unit)
    return found | ({"parity": parity_rows(session)} if unit == session.units[0] else {})


def unit_tables(session: Session, unit: Unit) -> dict[str, Any]:
    if "heads" in unit:
        (layer,) = unit["layers"]
        found = layer_tables(session, corpus_layer(session, layer, 0, unit["heads"]))
        if unit["heads"][0] != session.heads(layer)[0]:
            del found["layers"]  # the layer's row comes with its first heads
        return dict(found)
    rows: list[dict[str, Any]] = []  # bytes are small
    if session.own:
        window_layers(session, unit["window"], lambda state: rows.extend(layer_rows(state)))
    else:
        for layer in unit["layers"]:
            rows += layer_rows(corpus_layer(session, layer, unit["part"]))
    return {"states": {name: [row[name] for row in rows] for name in rows[0]}}


def parity_rows(session: Session) -> list[dict[str, Any]]:
    same = parity(session.loaded.model)
    return [{"parity": same.max_difference, "captured_layers": same.captured}]


# ---- the final tables


def consolidate(session: Session, shards: Sequence[Shard]) -> Mapping[str, Any]:
    """Parts and windows joined, heads in order, those that failed named, budgets, what was run."""
    spec = session.spec
    sampled = [shard for shard in shards if "moments" in shard.unit]
    states = "heads" not in session.units[0]
    tables = _joined(session, shards) if states else side_by_side(_measured(shards))
    same = tables.pop("parity", None)
    if states and len(shards) and "parity" in shards[0].tables:
        same = shards[0].tables["parity"].to_pandas()
    tables["heads"] = _with_missing(session, tables.get("heads", pd.DataFrame()))
    if spec.moments:
        tables = with_moments(tables, side_by_side(sampled), spec)
    frontier = tables.get("frontier", pd.DataFrame())
    if not len(frontier) and "curves" in tables:
        frontier = random_frontier(tables["heads"], tables["curves"])
    if len(frontier) and np.isfinite(frontier["relative"]).any():
        asked = [(epsilon, None) for epsilon in spec.epsilons]
        tables["budget"] = budget_table(frontier, asked, gradients_of(tables["heads"]))
    if spec.moments and len(found := agreement_table(tables, columns(spec)["heads"], spec.seed)):
        tables["agreement"] = found
    return tables | {"about": about(session, tables["heads"], same)}


def _measured(shards: Iterable[Shard]) -> Iterator[Shard]:
    """All but those of moments, one in memory at a time."""
    return (shard for shard in shards if "moments" not in shard.unit)


def side_by_side(shards: Iterable[Shard]) -> dict[str, pd.DataFrame]:
    """Rows of the shards' tables, one shard after the other."""
    frames: dict[str, list[pd.DataFrame]] = {}
    for shard in shards:
        for name, table in shard.tables.items():
            frames.setdefault(name, []).append(table.to_pandas())
    return {name: pd.concat(rows, ignore_index=True) for name, rows in frames.items()}


def _joined(session: Session, shards: Sequence[Shard]) -> dict[str, pd.DataFrame]:
    """Tables of layers whose states, of parts or of windows, are all there.

    One shard is in memory at a time, and the states of few layers: a window has those of all, and
    is read again for every few.
    """
    layers = list(session.layers)
    few = LAYERS if session.own else len(layers)
    frames: dict[str, list[pd.DataFrame]] = {"heads": [], "layers": []}
    for start in range(0, len(layers), few):
        for state in _whole(session, layers[start : start + few], _measured(shards)):
            for name, frame in layer_tables(session, state).items():
                frames.setdefault(name, []).append(frame)
    return {
        name: pd.concat(rows, ignore_index=True) if rows else pd.DataFrame()
        for name, rows in frames.items()
    }


def _whole(
    session: Session, layers: Sequence[int], shards: Iterable[Shard]
) -> Iterator[LayerState]:
    """The states of these layers over all parts or windows, each once its last piece was read."""
    pieces = len(session.query_windows) if session.own else len(session.parts)
    statistics = statistics_of(session.spec)
    states: dict[int, LayerState] = {}
    seen: Counter[int] = Counter()
    for shard in shards:
        table = shard.tables["states"]
        for layer in layers if session.own else shard.unit["layers"]:
            rows = table.filter(compute_arrow.equal(table["layer"], layer)).to_pylist()
            part = layer_from_rows(rows, statistics)
            states[layer] = join(states[layer], part, statistics) if layer in states else part
            seen[layer] += 1
            if seen[layer] == pieces:
                yield states.pop(layer)
        del table, rows, part


def _with_missing(session: Session, heads: pd.DataFrame) -> pd.DataFrame:
    """A row for every head that was asked for: one that has no result says so."""
    known = set(zip(heads["layer"], heads["head"], strict=True)) if len(heads) else set()
    reason = "the piece of work that holds this head failed; the manifest has the reason"
    rows = []
    for layer in session.layers:
        shape = session.loaded.shapes[layer]
        info = LayerInfo(layer, shape.heads, shape.kv_heads, 1.0, None, "")
        for head in session.heads(layer):
            if (layer, head) not in known:
                rows.append(failed_row(session, head_of(session, info, head, {}), reason))
    frames = [frame for frame in (heads, pd.DataFrame(rows)) if len(frame)]
    return pd.concat(frames, ignore_index=True).sort_values(["layer", "head"], ignore_index=True)


def about(session: Session, heads: pd.DataFrame, same: pd.DataFrame | None) -> pd.DataFrame:
    """One row: the model and the text as they were measured, the parity of the captured model with
    the plain one, and the largest difference between limits and the model's own outputs.
    """
    loaded, windows, corpus = session.loaded, session.windows, session.spec.corpus
    text = ", ".join(corpus.text) or corpus.dataset or f"packaged {corpus.packaged}"
    unknown = {"parity": math.nan, "captured_layers": 0}
    checked = unknown if same is None else same.iloc[0].to_dict()
    apart = heads["output_difference"].max() if "output_difference" in heads else math.nan
    row = {
        "model": loaded.name,
        "model_sha256": loaded.sha256,
        "weights": loaded.weights,
        "layers": loaded.layers,
        "heads": loaded.heads,
        "kv_heads": loaded.kv_heads,
        "width": loaded.width,
        "causal": loaded.causal,
        "parity": checked["parity"],
        "captured_layers": int(checked["captured_layers"]),
        "output_difference": float(apart),
        "text": text,
        "corpus_sha256": windows.sha256,
        "documents": windows.documents,
        "tokens": windows.tokens,
        "window": windows.length,
        "windows": len(windows),
        "pool": session.spec.pool,
        "keys": session.keys,
        "queries": len(session.queries),
    }
    return pd.DataFrame([row])


PROBE = Job(
    *("probe", ProbeSpec, units, compute, consolidate, hashes, columns),
    open=functools.partial(open_session, check=check_asked),
    cost=cost,
    check=check_registered,
)
