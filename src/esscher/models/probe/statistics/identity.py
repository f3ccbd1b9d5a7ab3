"""Which head it is, and how many keys its queries have seen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from esscher.models.probe.spec import ProbeSpec
from esscher.models.probe.statistics.statistic import (
    Block,
    Failure,
    Findings,
    Found,
    Start,
    Statistic,
)
from esscher.models.probe.tokens import LayerInfo
from esscher.runs.columns import Column

__all__ = ["HEAD", "KV_HEAD", "LAYER", "Identity", "Seen"]

LAYER = Column("layer", "int", "layer", "Layer of the model, counted from 0.", first=0)
HEAD = Column(
    "head", "int", "head", "Head within its layer, counted from 0; -1 is the whole layer.", first=1
)
KV_HEAD = Column(
    "kv_head",
    "int",
    "kv head",
    "Head whose keys and values this one reads; several query heads may share one.",
)


@dataclass(frozen=True)
class Seen:
    """The number of keys of each query, (m,) int64, and of queries with errors of kept keys."""

    keys: Tensor
    kept: int

    @property
    def mean(self) -> int:
        """The number of keys that a query sees, on average, to the nearest whole number."""
        return round(float(self.keys.double().mean()))


class Identity(Statistic):
    name = "identity"
    state = Seen

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return (
            LAYER,
            HEAD,
            KV_HEAD,
            Column("status", "word", "status", "ok, failed or refused.", first=2),
            Column("reason", "word", "reason", "Why a head was not measured."),
            Column(
                "n_keys",
                "int",
                "keys",
                "Number of keys in the pool the head was measured on; where each query has its own"
                " context, their mean.",
            ),
            Column("n_keys_least", "int", "keys, least", "Fewest keys that a query sees."),
            Column("n_keys_most", "int", "keys, most", "Most keys that a query sees."),
            Column("n_queries", "int", "queries", "Number of queries averaged over."),
            Column(
                "n_kept_queries",
                "int",
                "queries, kept keys",
                "Of them, queries that the errors of kept keys and the tails are of.",
            ),
        )

    def init(self, start: Start) -> Seen:
        return Seen(torch.zeros(start.queries, dtype=torch.int64), len(start.kept))

    def update(self, state: Seen, block: Block) -> Seen:
        real = block.positions >= 0  # a sink logit is no key
        seen = real.sum() if block.seen is None else (block.seen & real).sum(1)
        return replace(state, keys=state.keys + seen.cpu())

    def merge(self, a: Seen, b: Seen) -> Seen:
        return replace(a, keys=a.keys + b.keys)

    def stack(self, states: Any, order: Any) -> Seen:
        keys = torch.cat([state.keys for state in states])[order.queries]
        return Seen(keys, sum(state.kept for state in states))

    def finish(self, state: Seen, found: Found) -> Findings:
        row = _place(found.layer.info, found.head) | {
            "status": "ok",
            "reason": found.layer.info.note,
        }
        row |= {
            "n_keys": state.mean,
            "n_keys_least": int(state.keys.min()),
            "n_keys_most": int(state.keys.max()),
        }
        return Findings(row | {"n_queries": len(state.keys), "n_kept_queries": state.kept})

    def failed(self, failure: Failure) -> dict[str, Any]:
        row = _place(failure.info, failure.head) | {"status": "failed", "reason": failure.reason}
        row |= dict.fromkeys(("n_keys", "n_keys_least", "n_keys_most"), failure.keys)
        return row | {"n_queries": failure.queries, "n_kept_queries": 0}


def _place(info: LayerInfo, head: int) -> dict[str, Any]:
    return {"layer": info.layer, "head": head, "kv_head": info.kv_head(head)}
