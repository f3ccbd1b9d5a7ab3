"""A head's states, one of each statistic, while keys stream by: init, update, merge, stack, finish, and bytes to store."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from esscher.models.probe.packing import pack, unpack
from esscher.models.probe.statistics.statistic import Block, Findings, Found, Order, Start, Statistic
from esscher.models.probe.window import OVERFLOW

__all__ = ["HeadState", "finish", "from_bytes", "init", "kept_rows", "merge", "stack", "to_bytes", "update"]

Statistics = tuple[Statistic, ...]


@dataclass(frozen=True)
class HeadState:
    """``states``: by name of their statistic, in the order of ``statistics``. ``kept``: numbers of the kept queries."""

    statistics: Statistics
    states: Mapping[str, Any]
    kept: Tensor  # (m_kept,) int64


def kept_rows(queries: int, kept: int) -> Tensor:
    """The queries, evenly spread, that costly statistics are of."""
    return torch.linspace(0, queries - 1, min(kept, queries)).round().long()


def init(statistics: Statistics, start: Start) -> HeadState:
    """The states before any key."""
    return HeadState(statistics, {statistic.name: statistic.init(start) for statistic in statistics}, start.kept)


def update(head: HeadState, block: Block) -> HeadState:
    """The states after one more block of keys; the old ones must not be used again. ValueError: the head cannot go on."""
    if not bool(torch.isfinite(block.scores).all()) or not bool(torch.isfinite(block.values).all()):
        raise ValueError(OVERFLOW)
    return replace(head, states={each.name: each.update(head.states[each.name], block) for each in head.statistics})


def merge(a: HeadState, b: HeadState) -> HeadState:
    """The states over the union of two disjoint sets of keys, seen by the same queries."""
    return replace(a, states={each.name: each.merge(a.states[each.name], b.states[each.name]) for each in a.statistics})


def stack(heads: Sequence[HeadState], numbers: Sequence[Tensor]) -> HeadState:
    """The states of different queries, each over its own keys, as one; ``numbers`` are those of each head's queries."""
    every = torch.cat(list(numbers))
    kept = torch.cat([own[head.kept] for head, own in zip(heads, numbers, strict=True)])
    order = Order(every.argsort(), kept.argsort())
    states = {each.name: each.stack([head.states[each.name] for head in heads], order) for each in heads[0].statistics}
    return HeadState(heads[0].statistics, states, torch.searchsorted(every.sort().values, kept.sort().values))


def finish(
    head: HeadState, known: Found, notes: dict[str, dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, list[pd.DataFrame]]]:
    """The row of a head and its rows of long tables. ``known``: as the first statistic sees it; ``notes`` by name."""
    found: dict[str, Findings] = {}
    row: dict[str, Any] = {}
    long: dict[str, list[pd.DataFrame]] = {}
    for statistic in head.statistics:
        reads = {name: found[name] for name in statistic.reads}
        own = replace(
            known,
            states={name: head.states[name] for name in reads},
            values={name: findings.value for name, findings in reads.items()},
            row={key: value for findings in reads.values() for key, value in findings.columns.items()},
            notes=notes.setdefault(statistic.name, {}),
        )
        found[statistic.name] = findings = statistic.finish(head.states[statistic.name], own)
        keys = [column.key for column in statistic.columns(known.spec)]
        _expect(statistic, "columns", findings.columns, keys)
        _expect(statistic, "tables", findings.tables, statistic.tables(known.spec))
        row |= {key: findings.columns[key] for key in keys}
        for table, rows in findings.tables.items():
            long.setdefault(table, []).append(rows)
    return row, long


def _expect(statistic: Statistic, what: str, given: Collection[str], declared: Collection[str]) -> None:
    """Neither more nor less than what was declared: a mistake of the statistic, not of the head."""
    if set(given) != set(declared):
        raise TypeError(f"statistic {statistic.name}: declares the {what} {sorted(declared)}, gave {sorted(given)}")


def to_bytes(head: HeadState) -> bytes:
    single = [f".states.{each.name}{place}" for each in head.statistics for place in each.single(head.states[each.name])]
    return pack({"states": head.states, "kept": head.kept}, single)


def from_bytes(data: bytes, statistics: Statistics) -> HeadState:
    kinds = {"states": {statistic.name: statistic.state for statistic in statistics}, "kept": Tensor}
    return HeadState(statistics, **unpack(data, kinds))
