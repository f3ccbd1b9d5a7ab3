"""From the numbers of a layer's heads to rows of tables, and how they are stored on the way.

A head has a state of each statistic while keys stream by, then a few numbers of each query, then
its rows. States of parts merge, numbers of windows follow each other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import pandas as pd
import torch
from safetensors.torch import load, save
from torch import Tensor

from esscher.errors.grid import Deposit, Grid
from esscher.probe.budget import BUDGET, MODEL
from esscher.probe.session import FEWEST, Session
from esscher.probe.spec import ProbeSpec
from esscher.probe.statistic import (
    HEAD,
    KV_HEAD,
    LAYER,
    REACH,
    STORED,
    Head,
    HeadEnd,
    LayerInfo,
    LayerMoments,
    LayerSummary,
    Result,
    Statistic,
    concatenated,
    largest_variance,
)
from esscher.probe.statistics import statistics_of
from esscher.probe.statistics.errors import MOMENT_EXPONENTS
from esscher.runs.columns import Column
from esscher.tails.extremes import MEANINGS


@dataclass(frozen=True)
class HeadState:
    """What is known of a head: states of its statistics over the keys of a corpus seen so far (none
    where queries have their own context), and numbers of each query by statistic.
    """

    states: dict[str, Any]
    found: dict[str, dict[str, Tensor]]
    queries: Tensor  # (m,): among those of the probe
    kept: Tensor  # (m_kept,): the same of the kept ones
    keys: Tensor  # (m,): how many each query saw


@dataclass(frozen=True)
class LayerState:
    """Moments and heads of a layer, over some keys or some windows; a head that could not be
    measured has the reason, empty where no query sees enough keys.
    """

    info: LayerInfo
    moments: LayerMoments
    gram: Tensor | None
    heads: dict[int, HeadState | str]


def join(a: LayerState, b: LayerState, statistics: Sequence[Statistic]) -> LayerState:
    """The same queries over the keys of both, or the queries of both windows; a head that could not
    be measured in one of them has the reason.
    """
    heads = {head: _joined(one, b.heads[head], statistics) for head, one in a.heads.items()}
    return replace(a, moments=a.moments.merge(b.moments), heads=heads)


def _joined(
    a: HeadState | str, b: HeadState | str, statistics: Sequence[Statistic]
) -> HeadState | str:
    if isinstance(a, str) or isinstance(b, str):
        # a reason comes before numbers, and numbers before none
        return max(a, b, key=lambda known: 2 * bool(known) if isinstance(known, str) else 1)
    if a.states:
        merged = {
            each.name: each.merge(a.states[each.name], b.states[each.name]) for each in statistics
        }
        return replace(a, states=merged, keys=a.keys + b.keys)
    names = dict.fromkeys([*a.found, *b.found])
    found = {
        name: concatenated([part.found[name] for part in (a, b) if name in part.found])
        for name in names
    }
    rest = (torch.cat([getattr(x, key) for x in (a, b)]) for key in ("queries", "kept", "keys"))
    return HeadState({}, found, *rest)


# ---- rows of tables

IDENTITY = (
    LAYER,
    HEAD,
    KV_HEAD,
    Column("status", "word", "status", "ok or failed.", first=2),
    Column("reason", "word", "reason", "Why a head was not measured, or what was left out."),
    Column("n_keys", "int", "keys", "Number of keys that a query sees, on average."),
    Column("n_keys_least", "int", "keys, least", "Fewest keys that a query sees."),
    Column("n_keys_most", "int", "keys, most", "Most keys that a query sees."),
    Column("n_queries", "int", "queries", "Number of queries averaged over."),
)


def columns(spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
    """The columns of every table, in their order."""
    statistics = statistics_of(spec)
    own = (column for statistic in statistics for column in statistic.columns(spec))
    exponents = MOMENT_EXPONENTS if spec.moments else ()
    found: dict[str, tuple[Column, ...]] = {
        "heads": (*IDENTITY, *own, *exponents),
        "layers": (*LAYERS, *exponents),
        "budget": BUDGET,
        "nats": MODEL,
    }
    for statistic in statistics:
        found |= statistic.tables(spec)
    return found


def layer_tables(session: Session, state: LayerState) -> dict[str, pd.DataFrame]:
    """Rows of every table for one layer. States of a corpus are reduced one head at a time."""
    summary, notes = LayerSummary.of(state.info, state.moments, state.gram), dict[str, Any]()
    declared, statistics = columns(session.spec), statistics_of(session.spec)
    heads: list[dict[str, Any]] = []
    long: dict[str, list[pd.DataFrame]] = {}
    for number in list(state.heads):
        known = state.heads.pop(number)  # a state is large
        head = head_of(session, state.info, number, notes)
        try:
            if isinstance(known, str):
                raise ValueError(known or f"no query sees {FEWEST} keys; use longer windows")
            row, tables = _finished(session, summary, head, known, statistics)
        except ValueError as reason:
            row, tables = failed_row(session, head, str(reason)), []
        heads.append(row)
        for name, frame in tables:
            rows = frame.assign(layer=state.info.layer, head=number)
            wanted = [column.key for column in declared[name]]
            _expect(f"table {name}", rows.columns, wanted)
            long.setdefault(name, []).append(rows[wanted])
    found = {"heads": pd.DataFrame(heads), "layers": pd.DataFrame([layer_row(summary)])}
    return found | {name: pd.concat(frames, ignore_index=True) for name, frames in long.items()}


def _finished(
    session: Session,
    layer: LayerSummary,
    head: Head,
    known: HeadState,
    statistics: Sequence[Statistic],
) -> tuple[dict[str, Any], list[tuple[str, pd.DataFrame]]]:
    """The row of a head, and its rows of long tables."""
    found = {name: dict(numbers) for name, numbers in known.found.items()}
    for each in statistics if known.states else ():
        reduced = each.reduce(known.states[each.name], head)
        found[each.name] = {**reduced, **found.get(each.name, {})}
    queries, asked = session.queries.take(known.queries.numpy()), len(session.queries)
    notes = [layer.info.note] if layer.info.note else []
    if len(queries) < asked:
        few = asked - len(queries)
        notes.append(f"{few} of {asked} queries see fewer than {FEWEST} keys and are left out")
    row: dict[str, Any] = {
        "layer": head.info.layer,
        "head": head.head,
        "kv_head": head.kv_head,
        "status": "ok",
        "reason": "; ".join(notes),
        "n_keys": round(float(known.keys.double().mean())),
        "n_keys_least": int(known.keys.min()),
        "n_keys_most": int(known.keys.max()),
        "n_queries": len(queries),
    }
    end = HeadEnd(
        **vars(head),
        session=session,
        layer=layer,
        queries=queries,
        kept=torch.searchsorted(known.queries, known.kept).numpy(),
        found=found,
        row=row,
    )
    tables: list[tuple[str, pd.DataFrame]] = []
    for each in statistics:
        result: Result = each.finish(found.get(each.name, {}), end)
        keys = [column.key for column in each.columns(head.spec)]
        _expect(f"statistic {each.name}", result.columns, keys)
        row |= {key: result.columns[key] for key in keys}
        tables += result.tables.items()
    return row, tables


def head_of(session: Session, info: LayerInfo, head: int, notes: dict[str, Any]) -> Head:
    keys, most = session.mean_keys(info.layer), session.most_keys(info.layer)
    return Head(session.spec, info, head, keys, most, notes)


def _expect(who: str, given: Collection[str], declared: Collection[str]) -> None:
    """A mistake of the statistic, not of the head."""
    if set(given) != set(declared):
        raise TypeError(f"{who}: declares the columns {sorted(declared)}, gave {sorted(given)}")


def failed_row(session: Session, head: Head, reason: str) -> dict[str, Any]:
    """The row of a head that could not be measured."""
    row: dict[str, Any] = {}
    for column in columns(session.spec)["heads"]:
        row[column.key] = math.nan if column.kind == "float" else head.n_keys
        if column.kind == "word":
            row[column.key] = "unknown" if "unknown" in column.words else ""
    return row | {
        "layer": head.info.layer,
        "head": head.head,
        "kv_head": head.kv_head,
        "status": "failed",
        "reason": reason,
        "n_queries": len(session.queries),
    }


# ---- The table ``layers``.

KINDS = {"norm": "norms", "coordinate": "coordinates"}


def _tail_columns(kind: str, plural: str) -> tuple[Column, ...]:
    whole = f"Law of the largest token {plural}: a Gaussian's tail against Pareto's."
    text = f"The same of {plural} without first and special tokens."
    words, said = tuple(MEANINGS), tuple(MEANINGS.values())
    shape, ends = f"{kind}_shape", (f"{kind}_shape_low", f"{kind}_shape_high")
    what = f"Pareto shape of the largest {plural}; above 0 is a power tail, of exponent 1/shape."
    ratio, limits = f"{kind}_ratio", (f"{kind}_ratio_low", f"{kind}_ratio_high")
    likelier = "Log-likelihood a value of Pareto's tail less that of a Gaussian's."
    return (
        Column(f"{kind}_tail", "word", f"tail of {plural}", whole, words=words, meanings=said),
        Column(
            f"{kind}_tail_text",
            "word",
            f"{plural} without sinks",
            text,
            words=words,
            meanings=said,
        ),
        Column(shape, "float", f"Pareto shape of {plural}", what, ends=ends),
        Column(ends[0], "float", f"shape of {plural}, low", "Lower end of its 95 % interval."),
        Column(ends[1], "float", f"shape of {plural}, high", "Upper end of its 95 % interval."),
        Column(ratio, "float", f"likelihood ratio of {plural}", likelier, ends=limits),
        Column(limits[0], "float", f"ratio of {plural}, low", "Lower end of its 95 % interval."),
        Column(limits[1], "float", f"ratio of {plural}, high", "Upper end of its 95 % interval."),
    )


LAYERS = (
    Column("layer", "int", "layer", "Layer of the model, counted from 0.", first=0),
    Column("tokens", "int", "tokens", "Number of tokens that entered the layer."),
    REACH,
    Column("verdict", "word", "verdict", "Tokens are sub-Gaussian, heavier, or it is undecided."),
    Column("reason", "word", "reason", "The numbers behind the verdict."),
    *(column for kind, plural in KINDS.items() for column in _tail_columns(kind, plural)),
)


def layer_row(layer: LayerSummary) -> dict[str, Any]:
    """What is known of the tokens that enter the layer."""
    hidden, whole, text = layer.moments.hidden, layer.tails, layer.text_tails
    row: dict[str, Any] = {
        column.key: math.nan if column.kind == "float" else "unknown" if column.words else ""
        for column in LAYERS
    }
    row |= {"layer": layer.info.layer, "tokens": layer.moments.q.count}
    if hidden is None or whole is None or text is None:
        return row | {"verdict": "unknown"}
    told = []
    for kind, plural in KINDS.items():
        found, without = getattr(whole, plural), getattr(text, plural)
        row |= {
            f"{kind}_tail": found.verdict,
            f"{kind}_tail_text": without.verdict,
            f"{kind}_shape": found.shape,
            f"{kind}_shape_low": found.shape_interval[0],
            f"{kind}_shape_high": found.shape_interval[1],
            f"{kind}_ratio": found.ratio,
            f"{kind}_ratio_low": found.ratio_interval[0],
            f"{kind}_ratio_high": found.ratio_interval[1],
        }
        told.append(f"{plural.capitalize()}: {found.reason}.")
        if without.verdict != found.verdict:
            told.append(f"Without first and special tokens, {without.reason}.")
    return row | {
        "reach": largest_variance(hidden.cov),
        "verdict": whole.verdict,
        "reason": " ".join(told),
    }


# ---- stored states: safetensors, and the tree they hang on as JSON; no pickle

TREE = "tree"  # places begin with a point, so that none is this one


def layer_rows(state: LayerState) -> list[dict[str, Any]]:
    """The state as rows of a table: one for the layer itself (head -1) and one for each head."""
    layer = state.info.layer
    itself = pack({"info": state.info, "moments": state.moments, "gram": state.gram})
    rows = [{"layer": layer, "head": -1, "reason": "", "state": itself}]
    for head, known in state.heads.items():
        reason, data = (known, b"") if isinstance(known, str) else ("", pack(known))
        rows.append({"layer": layer, "head": head, "reason": reason, "state": data})
    return rows


def layer_from_rows(
    rows: Iterable[Mapping[str, Any]], statistics: Sequence[Statistic]
) -> LayerState:
    """The state of one layer from its rows."""
    states = [kind for each in statistics for kind in each.state]
    classes = {kind.__name__: kind for kind in (*STORED, HeadState, Deposit, Grid, *states)}
    known: dict[int, Any] = {
        row["head"]: unpack(row["state"], classes) if row["state"] else row["reason"]
        for row in rows
    }
    return LayerState(**known.pop(-1), heads=known)


def pack(value: Any) -> bytes:
    """Dataclasses, mappings, tensors, numbers and words as bytes."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_tree("", value, tensors))
    tensors[TREE] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return save(tensors)


def unpack(data: bytes, classes: Mapping[str, type]) -> Any:
    """What was packed; ``classes``: the dataclasses that it may hold, by name."""
    tensors = load(data)
    return _value("", json.loads(bytes(tensors[TREE].numpy())), classes, tensors)


def _tree(place: str, value: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if isinstance(value, Tensor):
        kind: dict[str, Any] = {"tensor": str(value.dtype).removeprefix("torch.")}
        square = value.ndim >= 2 and value.shape[-1] == value.shape[-2] > 1
        if square and torch.equal(value, value.mT):  # a half is enough
            upper = torch.triu_indices(*value.shape[-2:], device=value.device)
            value, kind = value[..., upper[0], upper[1]], kind | {"side": value.shape[-1]}
        # safetensors refuses tensors that share their memory
        tensors[place] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return kind
    if is_dataclass(value):
        parts = {part.name: getattr(value, part.name) for part in fields(value)}
        tree = _tree(place, parts, tensors) | {"class": type(value).__name__}
        if isinstance(value, Deposit) and value.grid.tol > 1e-8:  # known no better than float32
            tensors[f"{place}.cells"] = tensors[f"{place}.cells"].float()
        return tree
    if isinstance(value, Mapping):
        return {"of": {name: _tree(f"{place}.{name}", x, tensors) for name, x in value.items()}}
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    raise TypeError(
        f"{place[1:]}: expected a dataclass, a mapping, a tensor, a number, a word or None, got"
        f" {type(value).__name__}"
    )


def _value(
    place: str, tree: dict[str, Any], classes: Mapping[str, type], tensors: dict[str, Tensor]
) -> Any:
    if "plain" in tree:
        return tree["plain"]
    if "tensor" in tree:
        found = tensors[place].to(getattr(torch, tree["tensor"]))
        if "side" not in tree:
            return found
        row, column = torch.triu_indices(tree["side"], tree["side"])
        whole = found.new_empty(*found.shape[:-1], tree["side"], tree["side"])
        whole[..., row, column] = whole[..., column, row] = found
        return whole
    parts = {name: _value(f"{place}.{name}", x, classes, tensors) for name, x in tree["of"].items()}
    return classes[tree["class"]](**parts) if "class" in tree else parts
