"""What a statistic is, and what it sees of a head.

Write ``measure``: from all keys of some queries, a few numbers of each query, by name. Without a
``finish`` of its own a column is the mean over the queries of the numbers of that name.

    found = measure(head)                 tensors with a row for each query
    columns, tables = finish(found, end)  of the head, once all windows and parts are there

A statistic that should also work on a corpus larger than memory streams: it writes ``init``,
``update``, ``merge`` and ``reduce`` in place of ``measure``. Its state must not grow with the
number of keys, nor depend (but for rounding) on how keys came in blocks.

    state = update(init(head), head)      for every block of keys
    state = merge(a, b)                   same queries, disjoint keys
    found = reduce(state, head)           after the last key
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from esscher.hf.call import score
from esscher.probe.all_keys import AllKeys
from esscher.probe.spec import ProbeSpec
from esscher.probe.tokens import LayerInfo, LayerSummary
from esscher.runs.columns import Column

if TYPE_CHECKING:
    from esscher.probe.session import Queries, Session
    from esscher.probe.window import WindowQueries

Numbers = Mapping[str, Tensor]
"""Numbers of queries by name, a row for each query."""

LAYER = Column("layer", "int", "layer", "Layer of the model, counted from 0.", first=0)
HEAD = Column("head", "int", "head", "Head in its layer, from 0; -1 is the whole layer.", first=1)
KV_HEAD = Column("kv_head", "int", "kv head", "Key-value head that this head reads.")
ACCURACY = Column("accuracy", "float", "accuracy", "Relative error of the numerical integrals.")


@dataclass(frozen=True, eq=False)
class Head:
    """Which head it is."""

    spec: ProbeSpec
    info: LayerInfo
    head: int
    n_keys: int  # that a query sees on average, as planned: ladders are made from it
    most_keys: int  # that a query sees
    notes: dict[str, Any]  # shared by the heads of a layer

    @property
    def kv_head(self) -> int:
        return self.info.kv_head(self.head)


class OwnWindow(ABC):
    """What a query's own context knows beyond its keys."""

    @abstractmethod
    def outputs(self, head: int) -> Tensor: ...

    @abstractmethod
    def gradient(self, head: int) -> float | None: ...

    @abstractmethod
    def rule_errors(self, head: int) -> dict[str, Tensor] | None: ...


@dataclass(frozen=True, eq=False)
class HeadView(Head):
    """m queries of a head and B keys: all that they see, or one block of the corpus."""

    queries: Tensor  # (m, k)
    keys: Tensor  # (B, k)
    values: Tensor  # (B, d_v)
    positions: Tensor  # (B,): the place of each key in its window; -1: a sink logit, no key
    kept: Tensor  # (m_kept,): the queries that costly statistics are of
    center: Tensor  # (d_v,) float64: near the values
    pieces: Tensor | None = None  # (B,) rising: of a corpus, which of its equal pieces a key is in
    seen: Tensor | None = None  # (m, B): which keys each query sees; None: all
    given: Tensor | None = None  # (m, B): scores that are known already
    all_keys: AllKeys | None = None  # every key of the queries, where they are held
    window: OwnWindow | None = None  # of queries in their own context
    rows: Tensor | None = None  # (m,): these queries among those of the window

    @cached_property
    def scores(self) -> Tensor:
        """(m, B), as the model computes them; -inf where a query does not see the key."""
        if self.given is not None:
            return self.given
        return score(self.queries, self.keys, self.info.scale, self.info.softcap)

    @cached_property
    def kept_scores(self) -> Tensor:
        """(m_kept, B)."""
        return self.scores[self.kept.to(self.scores.device)]

    @cached_property
    def kept_keys(self) -> AllKeys | None:
        """All keys, for the kept queries."""
        return None if self.all_keys is None else self.all_keys.only(self.kept)

    @cached_property
    def weights(self) -> Tensor:
        """(m, B): softmax over these keys."""
        return torch.softmax(self.scores.double(), -1)

    @cached_property
    def outputs(self) -> Tensor | None:
        """(m, d_v): the model's own outputs, in a query's own context."""
        if self.window is None or self.rows is None:
            return None
        return self.window.outputs(self.head)[self.rows]

    @property
    def gradient(self) -> float | None:
        """Root mean square gradient of log p of next tokens at the head's output."""
        return None if self.window is None else self.window.gradient(self.head)

    @cached_property
    def rule_errors(self) -> dict[str, Tensor] | None:
        """Exact errors of the keep rules (statistics/frontier.py), where they are compared."""
        return None if self.window is None else self.window.rule_errors(self.head)


@dataclass(frozen=True, eq=False)
class HeadEnd(Head):
    """What a statistic may know at the end."""

    session: Session
    layer: LayerSummary
    queries: Queries  # where each of the m queries stands
    kept: npt.NDArray[np.int64]  # (m_kept,): which of them are the kept ones
    found: Mapping[str, Numbers]  # numbers of all statistics, by name
    row: Mapping[str, Any]  # columns of the statistics before


@dataclass(frozen=True)
class Result:
    """Columns of the head's row, and rows of long tables; layer and head are added to them."""

    columns: Mapping[str, Any]
    tables: Mapping[str, pd.DataFrame]


class Statistic:
    """One thing to measure of a head; see the top of this module."""

    name: ClassVar[str]
    state: ClassVar[tuple[type, ...]] = ()  # dataclasses that a streaming state is made of
    streams: ClassVar[bool] = True  # whether it can measure a corpus block by block

    def __init_subclass__(cls) -> None:
        cls.streams = "measure" not in vars(cls) or "update" in vars(cls)

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        """What it adds to the row of a head."""
        return ()

    def tables(self, spec: ProbeSpec) -> Mapping[str, tuple[Column, ...]]:
        """Columns of the long tables it adds rows to, ``layer`` and ``head`` among them."""
        return {}

    def measure(self, head: HeadView) -> Numbers:
        """Numbers of each query from all of its keys. ValueError: the head cannot be measured."""
        return self.reduce(self.update(self.init(head), head), head)

    def in_window(self, window: WindowQueries) -> Numbers:
        """Numbers (heads, ...) from the queries' own window, whatever the pool is."""
        return {}

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        """All declared columns, and rows of declared tables alone."""
        keys = [column.key for column in self.columns(end.spec)]
        return Result({key: float(found[key].double().mean()) for key in keys}, {})

    # ---- streaming

    def init(self, head: HeadView) -> Any:
        """The state before any key."""
        return None

    def update(self, state: Any, head: HeadView) -> Any:
        """The state after one more block of keys; tensors of the old one may be written to."""
        return None

    def merge(self, a: Any, b: Any) -> Any:
        """The state over disjoint keys of the same queries."""
        return None

    def reduce(self, state: Any, head: Head) -> Numbers:
        """What is left after the last key."""
        return {}


def concatenated(parts: list[Numbers]) -> dict[str, Tensor]:
    """Numbers of different queries, one below the other; rows of other lengths grow by zeros at
    their beginning.
    """
    names = dict.fromkeys(name for part in parts for name in part)
    found = {}
    for name in names:
        tensors = [part[name] for part in parts if name in part]
        if tensors[0].ndim > 1:
            longest = max(tensor.shape[-1] for tensor in tensors)
            tensors = [
                torch.nn.functional.pad(tensor, (longest - tensor.shape[-1], 0))
                for tensor in tensors
            ]
        found[name] = torch.cat(tensors)
    return found
