"""From the numbers of a layer's heads to rows of tables, and how they are stored on the way.

A head has a state of each statistic while keys stream by, then a few numbers of each query, then
its rows. States of parts merge, numbers of windows follow each other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import pandas as pd
import torch
from safetensors.torch import load, save
from torch import Tensor

from esscher.errors.grid import Deposit
from esscher.probe.budget import BUDGET, MODEL, TOKENS
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
    Result,
    Statistic,
    largest_variance,
)
from esscher.probe.statistics import statistics_of
from esscher.probe.statistics.errors import MOMENT_EXPONENTS
from esscher.runs.columns import Column, with_ends
from esscher.runs.progress import advance
from esscher.tails.extremes import MEANINGS, TokenTails

_T = TypeVar("_T")


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

    @property
    def device(self) -> torch.device:
        return self.moments.pair.mean.device


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
    found = {
        name: {
            key: torch.cat([x.found[name][key] for x in (a, b) if key in x.found[name]])
            for key in {**a.found[name], **b.found[name]}
        }
        for name in a.found
    }
    rest = (torch.cat([getattr(x, key) for x in (a, b)]) for key in ("queries", "kept", "keys"))
    return HeadState({}, found, *rest)


def for_heads(
    task: Callable[[int], _T], heads: Sequence[int], device: torch.device
) -> Iterator[_T]:
    """What a task returns for each head, in their order. On the CPU heads share torch's threads:
    one head's operations are too small for two.
    """
    threads = torch.get_num_threads()
    at_once = min(threads, len(heads)) if device.type == "cpu" else 1
    if at_once < 2:
        yield from map(task, heads)
        return
    pool = ThreadPoolExecutor(at_once, "heads", torch.set_num_threads, (threads // at_once,))
    try:
        yield from pool.map(task, heads)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # for threads to come; this one kept its own


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
        "tokens": TOKENS,
    }
    for statistic in statistics:
        found |= statistic.tables(spec)
    for name, table in found.items():
        keys = [column.key for column in table]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise ValueError(f"statistics: {', '.join(twice)}: declared twice in table {name}")
    return found


def layer_tables(
    session: Session,
    state: LayerState,
    heads: Sequence[int] | None = None,
    measure: Callable[[int], HeadState | str] | None = None,
) -> dict[str, pd.DataFrame]:
    """Rows of every table for one layer. ``measure`` gives the state of each of the ``heads``; by
    default those of ``state`` are taken from it.
    """
    notes, tails = dict[str, Any](), state.moments.tails
    declared = columns(session.spec)
    numbers = list(state.heads) if heads is None else heads

    of = state.heads.pop if measure is None else measure

    def finished(number: int) -> tuple[dict[str, Any], list[tuple[str, pd.DataFrame]]]:
        head = head_of(session, state.info, number, notes)
        try:
            return _finished(session, state, tails, head, of)
        except ValueError as reason:
            return failed_row(session, state.info.layer, number, str(reason)), []

    rows: list[dict[str, Any]] = []
    long: dict[str, list[pd.DataFrame]] = {}
    made = for_heads(finished, numbers, state.device)
    for number, (row, tables) in zip(numbers, made, strict=True):
        rows.append(row)
        for name, frame in tables:
            own = frame.assign(layer=state.info.layer, head=number)
            wanted = [column.key for column in declared[name]]
            _expect(f"table {name}", own.columns, wanted)
            long.setdefault(name, []).append(own[wanted])
        advance(len(rows) / len(numbers))
    found = {"heads": pd.DataFrame(rows), "layers": pd.DataFrame([layer_row(state, tails)])}
    return found | {name: pd.concat(frames, ignore_index=True) for name, frames in long.items()}


def _finished(
    session: Session,
    layer: LayerState,
    tails: TokenTails | None,
    head: Head,
    of: Callable[[int], HeadState | str],
) -> tuple[dict[str, Any], list[tuple[str, pd.DataFrame]]]:
    """The row of a head, and its rows of long tables; ``of`` gives its state."""
    statistics, known = statistics_of(session.spec), of(head.head)
    if isinstance(known, str):
        raise ValueError(known or f"no query sees {FEWEST} keys; use longer windows")
    found = {name: dict(numbers) for name, numbers in known.found.items()}
    states, known = dict(known.states), replace(known, states={})
    for each in statistics if states else ():
        reduced = each.reduce(states.pop(each.name), head)  # a state is large
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
        moments=layer.moments,
        tails=tails,
        gram=layer.gram,
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


def failed_row(session: Session, layer: int, head: int, reason: str) -> dict[str, Any]:
    """The row of a head that could not be measured."""
    row: dict[str, Any] = {}
    for column in columns(session.spec)["heads"]:
        row[column.key] = math.nan if column.kind == "float" else session.mean_keys(layer)
        if column.kind == "word":
            row[column.key] = "unknown" if "unknown" in column.words else ""
    shape = session.loaded.shapes[layer]
    return row | {
        "layer": layer,
        "head": head,
        "kv_head": head // (shape.heads // shape.kv_heads),
        "status": "failed",
        "reason": reason,
        "n_queries": len(session.queries),
    }


# ---- The table ``layers``.

KINDS = {"norm": "norms", "coordinate": "coordinates"}


def _tail_columns(kind: str, plural: str) -> tuple[Column, ...]:
    whole = f"Law of the largest token {plural}: a Gaussian's tail against Pareto's."
    words, said, interval = tuple(MEANINGS), tuple(MEANINGS.values()), "95 % interval"
    what = f"Pareto shape of the largest {plural}; above 0 is a power tail, of exponent 1/shape."
    likelier = "Log-likelihood a value of Pareto's tail less a Gaussian's."
    ratio = Column(f"{kind}_ratio", "float", f"likelihood ratio of {plural}", likelier)
    return (
        Column(f"{kind}_tail", "word", f"tail of {plural}", whole, words=words, meanings=said),
        *with_ends(Column(f"{kind}_shape", "float", f"Pareto shape of {plural}", what), interval),
        *with_ends(ratio, interval),
    )


LAYERS = (
    LAYER,
    Column("tokens", "int", "tokens", "Number of tokens that entered the layer."),
    REACH,
    Column("verdict", "word", "verdict", "Tokens are sub-Gaussian, heavier, or it is undecided."),
    Column("reason", "word", "reason", "The numbers behind the verdict."),
    *(column for kind, plural in KINDS.items() for column in _tail_columns(kind, plural)),
)


def layer_row(layer: LayerState, tails: TokenTails | None) -> dict[str, Any]:
    """What is known of the tokens that enter the layer."""
    hidden = layer.moments.hidden
    row: dict[str, Any] = {
        column.key: math.nan if column.kind == "float" else "unknown" if column.words else ""
        for column in LAYERS
    }
    row |= {"layer": layer.info.layer, "tokens": layer.moments.pair.count}
    if hidden is None or tails is None:
        return row | {"verdict": "unknown"}
    told = []
    for kind, plural in KINDS.items():
        found = getattr(tails, plural)
        row[f"{kind}_tail"] = found.verdict
        for name in ("shape", "ratio"):
            key, ends = f"{kind}_{name}", getattr(found, f"{name}_interval")
            row |= {key: getattr(found, name), f"{key}_low": ends[0], f"{key}_high": ends[1]}
        told.append(f"{plural.capitalize()}: {found.reason}.")
    return row | {
        "reach": largest_variance(hidden.cov),
        "verdict": tails.verdict,
        "reason": " ".join(told),
    }


# ---- stored states: safetensors, and the tree they hang on as JSON; no pickle

TREE = "tree"  # places begin with a point, so that none is this one


def pack(state: LayerState) -> bytes:
    """The state of a layer as bytes."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_tree("", vars(state), tensors))
    tensors[TREE] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return save(tensors)


def unpack(data: bytes, statistics: Sequence[Statistic]) -> LayerState:
    """The state from its bytes; no class is made but those of states."""
    states = [kind for each in statistics for kind in each.state]
    classes = {kind.__name__: kind for kind in (*STORED, HeadState, *states)}
    tensors = load(data)
    found = _value("", json.loads(bytes(tensors[TREE].numpy())), classes, tensors)
    heads = {int(head): known for head, known in found.pop("heads").items()}
    return LayerState(**found, heads=heads)


def _tree(place: str, value: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if isinstance(value, Tensor):
        # safetensors refuses tensors that share their memory
        tensors[place] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": str(value.dtype).removeprefix("torch.")}
    if is_dataclass(value):
        parts = {part.name: getattr(value, part.name) for part in fields(value)}
        tree = _tree(place, parts, tensors) | {"class": type(value).__name__}
        if isinstance(value, Deposit) and value.grid.single:  # known no better than float32
            tensors[f"{place}.cells"] = tensors[f"{place}.cells"].float()
        return tree
    if isinstance(value, tuple):
        return _tree(place, dict(enumerate(value)), tensors) | {"class": "tuple"}
    if isinstance(value, Mapping):
        return {"of": {name: _tree(f"{place}.{name}", x, tensors) for name, x in value.items()}}
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    raise TypeError(f"{place[1:]}: expected a dataclass, a mapping, a tensor or a number")


def _value(
    place: str, tree: dict[str, Any], classes: Mapping[str, type], tensors: dict[str, Tensor]
) -> Any:
    if "plain" in tree:
        return tree["plain"]
    if "tensor" in tree:
        return tensors[place].to(getattr(torch, tree["tensor"]))
    parts = {name: _value(f"{place}.{name}", x, classes, tensors) for name, x in tree["of"].items()}
    if tree.get("class") == "tuple":
        return tuple(parts.values())
    return classes[tree["class"]](**parts) if "class" in tree else parts
