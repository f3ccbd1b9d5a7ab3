"""The contract of a statistic: what it keeps of a head's keys while they stream by, and what it
says of the head at the end.

    state = init(start)                      before any key
    state = update(state, block)             for every block of keys
    state = merge(a, b)                      of the same queries over disjoint keys
    state = settle(state, met)               every key was met: what is left of them
    state = stack(states, order)
    settled, of different queries, each over keys of its own
    columns, rows = finish(state, found)
    columns of the head's row, rows of long tables; the state is settled

None of these may depend on how keys came in blocks or parts, but for rounding, and a state must not
grow with the number of keys. A state is a dataclass of tensors, numbers, words and dataclasses, or
None where a statistic only reads others; that is all it takes to be stored
(esscher.probe.layer). Where each query has a context of its own, a state is settled as
soon as its window has gone by: what is kept of it should be a few numbers of each query.

Statistics stand in a list; one may read what those before it found, if it names them in ``reads``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from esscher.probe.rules import RuleErrors
from esscher.probe.session import Places
from esscher.probe.spec import ProbeSpec
from esscher.probe.tokens import LayerInfo, LayerSummary
from esscher.probe.wide import Held
from esscher.runs.columns import Column


@dataclass(frozen=True)
class Start:
    """What is known of a head before its first key."""

    # (m_kept,) int64: numbers of the queries that costly statistics are of, `kept_queries` of the
    # spec
    kept: Tensor
    sink_mass: Tensor  # (m,): the weight that each query puts on sink tokens of its own window
    keys: int  # how many will come, on average over the queries
    center: Tensor  # (d_v,) float64: near the values
    dtype: torch.dtype  # of scores and values

    @property
    def queries(self) -> int:
        """m."""
        return len(self.sink_mass)


@dataclass(frozen=True)
class Block:
    """B keys as the head's queries see them."""

    scores: Tensor  # (m, B): -inf where a query does not see the key
    queries: Tensor  # (m, k)
    keys: Tensor  # (B, k)
    values: Tensor  # (B, d_v)
    positions: Tensor  # (B,) int64: the place of each key in its window; -1: a sink logit, no key
    kept: Tensor  # as in Start
    # (B, d): what entered the layer at each key, where the corpus is the pool
    hidden: Tensor | None = None
    pool: Held | None = None  # all keys of the head, where they are held
    # what keep rules cost the queries, where they see their own context
    by_rule: Callable[[], RuleErrors] | None = None
    seen: Tensor | None = None  # (m, B): which keys each query sees; None: all
    # (m, d_v): what the model itself made of these keys, where they are a query's own context
    outputs: Tensor | None = None
    # (B,) int8, rising: the piece of the pool each key is of, where the corpus is the pool
    pieces: Tensor | None = None
    # that next tokens have at the head's output, where keep rules are compared
    gradient: float | None = None

    @cached_property
    def kept_scores(self) -> Tensor:
        """(m_kept, B)."""
        return self.scores[self.kept.to(self.scores.device)]


@dataclass(frozen=True)
class Met:
    """What is known of a head once every key was met."""

    spec: ProbeSpec
    info: LayerInfo
    head: int
    # that a query sees on average, as foreseen for the whole probe: ladders are made from it
    keys: int
    notes: dict[str, Any]  # the statistic's own, from one head of a layer to the next


@dataclass(frozen=True)
class Order:
    """The places that stacked queries take: query i of the result is number ``queries[i]`` of those
    side by side.
    """

    queries: Tensor  # (m,)
    kept: Tensor  # (m_kept,): the same among the kept ones


@dataclass(frozen=True)
class Found:
    """What a statistic may know at the end. Of the others it has those that it reads, by name."""

    spec: ProbeSpec
    layer: LayerSummary
    head: int
    keys: int  # as in Met
    places: Places  # where each of the m queries stands
    states: Mapping[str, Any]
    values: Mapping[str, Any]
    row: Mapping[str, Any]  # columns

    @property
    def windows(self) -> npt.NDArray[np.int64]:
        """(m,): the window each query stands in."""
        return self.places.windows


@dataclass(frozen=True)
class Findings:
    """Columns of the head's row, rows of long tables (layer and head are added), and a value for
    who reads it.
    """

    columns: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    value: Any = None


@dataclass(frozen=True)
class Failure:
    """A head that could not be measured."""

    info: LayerInfo
    head: int
    reason: str
    keys: int
    queries: int


class Statistic(ABC):
    """One thing to measure of a head. Only ``finish`` must be written; a statistic with a state
    writes the others too.
    """

    name: ClassVar[str]
    reads: ClassVar[tuple[str, ...]] = ()
    state: ClassVar[Any] = None  # the dataclass of its states
    settled: ClassVar[Any] = None  # that of its settled states, where it is another
    # states may be of several heads that share keys, until ``stack`` takes those of one out
    together: ClassVar[bool] = False

    def asked(self, spec: ProbeSpec) -> Statistic:
        """Itself as a probe asks for it: with the settings that ``init`` and ``update`` need."""
        return self

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        """What it adds to the row of a head."""
        return ()

    def tables(self, spec: ProbeSpec) -> Mapping[str, tuple[Column, ...]]:
        """The columns of the long tables it adds rows to, ``layer`` and ``head`` among them."""
        return {}

    def init(self, start: Start) -> Any:
        return None

    def update(self, state: Any, block: Block) -> Any:
        """The state after one more block of keys. The old one is not used again: its tensors may be
        written to.
        """
        return state

    def merge(self, a: Any, b: Any) -> Any:
        if a is not None:
            raise TypeError(f"statistic {self.name}: a state that cannot merge; write merge")
        return None

    def settle(self, state: Any, met: Met) -> Any:
        """What is left of the keys, of each query. ValueError: the head cannot be measured, and
        why.
        """
        return state

    def stack(self, states: Sequence[Any], order: Order) -> Any:
        """By default every tensor of a state has a row for each query, and the rest is the same for
        all.

        Where ``together``, ``order`` may name some of the queries alone.
        """
        return stacked(states, order.queries)

    def single(self, state: Any) -> tuple[str, ...]:
        """Places of float64 tensors, as ``.cells``, that are stored as float32 since they are known
        no better.
        """
        return ()

    @abstractmethod
    def finish(self, state: Any, found: Found) -> Findings:
        """All declared columns, and rows of declared tables alone. ValueError: the head cannot be
        measured, and why.
        """

    def failed(self, failure: Failure) -> dict[str, Any]:
        """Columns of a head that could not be measured, where they are not NaN or an empty word."""
        return {}


def stacked(states: Sequence[Any], order: Tensor) -> Any:
    """Tensors of all states one below the other, in this order; whatever else they hold is the same
    in all.
    """
    first = states[0]
    if isinstance(first, Tensor):
        return torch.cat(list(states))[order.to(first.device)]
    if is_dataclass(first) and not isinstance(first, type):
        parts = {
            part.name: stacked([getattr(state, part.name) for state in states], order)
            for part in fields(first)
        }
        return replace(first, **parts)
    if any(state != first for state in states):
        raise TypeError(
            f"expected the same number for all queries, got {list(states)}; write stack"
        )
    return first


# ---- How exact the exact error is.

ACCURACY = Column(
    "accuracy",
    "float",
    "accuracy",
    "Estimated relative error of the numerical integrals behind the exact curve.",
)


class Accuracy(Statistic):
    name = "accuracy"
    reads = ("replacement",)

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return (ACCURACY,)

    def finish(self, state: None, found: Found) -> Findings:
        return Findings({"accuracy": found.values["replacement"].accuracy})


# ---- Which head it is, and how many keys its queries have seen.

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
