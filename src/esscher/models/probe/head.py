"""A head's states, one of each statistic, while keys stream by: init, update, merge, settle, stack,
finish, bytes to store.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from esscher.models.probe.packing import pack, unpack
from esscher.models.probe.statistics.statistic import (
    Block,
    Findings,
    Found,
    Met,
    Order,
    Start,
    Statistic,
)
from esscher.models.probe.window import OVERFLOW

__all__ = [
    "HeadState",
    "finish",
    "from_bytes",
    "init",
    "kept_rows",
    "merge",
    "settle",
    "stack",
    "to_bytes",
    "update",
]

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
