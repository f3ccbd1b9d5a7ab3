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
(esscher.models.probe.packing). Where each query has a context of its own, a state is settled as
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

from esscher.models.probe.context import Places
from esscher.models.probe.spec import ProbeSpec
from esscher.models.probe.tokens import LayerInfo, LayerSummary
from esscher.models.probe.wide import Held
from esscher.models.probe.window import RuleErrors
from esscher.runs.columns import Column

__all__ = ["Block", "Failure", "Findings", "Found", "Met", "Order", "Start", "Statistic", "stacked"]


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
