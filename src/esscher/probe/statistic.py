"""What a statistic is, and what it sees of a layer and of a head.

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

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.errors.grid import Deposit, Grid
from esscher.hf.call import AttentionCall, at_least_single, score
from esscher.inputs import as_tensor
from esscher.probe.spec import ProbeSpec
from esscher.runs.columns import Column
from esscher.tails import extremes
from esscher.tails.extremes import Extremes, TokenTails

if TYPE_CHECKING:
    from esscher.probe.pools import WindowLayer
    from esscher.probe.session import Queries, Session

Numbers = Mapping[str, Tensor]
"""Numbers of queries by name, a row for each query."""

LAYER = Column("layer", "int", "layer", "Layer of the model, counted from 0.", first=0)
HEAD = Column("head", "int", "head", "Head in its layer, from 0; -1 is the whole layer.", first=1)
KV_HEAD = Column("kv_head", "int", "kv head", "Key-value head that this head reads.")
REACH = Column("reach", "float", "reach", "Largest variance of the tokens in any direction.")
ACCURACY = Column("accuracy", "float", "accuracy", "Relative error of the numerical integrals.")
OVERFLOW = (
    "scores or values are not finite: the activations of the model overflow; try --dtype float32"
)


# ---- tokens of a layer


@dataclass(frozen=True)
class LayerInfo:
    """What a layer's attention is, besides its tokens."""

    layer: int
    heads: int
    kv_heads: int
    scale: float
    softcap: float | None
    note: str  # what the pool leaves out of this attention; empty where nothing is

    @classmethod
    def of(cls, captured: AttentionCall, *, own: bool = False) -> LayerInfo:
        """``own``: queries meet the keys of their own context, where biases and sinks are known."""
        left_out = []
        if captured.bias is not None and not own:
            left_out.append("position bias of the scores")
        if captured.sinks is not None and not own:
            left_out.append("sink logit")
        note = f"left out of the pool: {', '.join(left_out)}" if left_out else ""
        if captured.sinks is not None and own:
            note = "a sink logit is in the softmax: keep rules never drop it, draws may take it"
        heads, kv_heads = captured.heads, captured.kv_heads
        return cls(captured.layer, heads, kv_heads, captured.scale, captured.softcap, note)

    def kv_head(self, head: int) -> int:
        """The key-value head that a head reads."""
        return head // (self.heads // self.kv_heads)


def token_tensors(captured: AttentionCall, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q (H, B, k), k and v (H_kv, B, .) of the chosen (batch, tokens) tokens."""
    q, k, v = (
        at_least_single(x).transpose(0, 1)[:, chosen]
        for x in (captured.query, captured.key, captured.value)
    )
    return q, k, v


@dataclass(frozen=True)
class TokenMoments:
    """Mean m and scatter S = sum (y - m)(y - m)^T of n tokens y, float64; leading axes (heads) hold
    separate sets with the same number of tokens.
    """

    count: int
    mean: Float64[Tensor, "*batch d"]
    scatter: Float64[Tensor, "*batch d d"]

    @property
    def cov(self) -> Float64[Tensor, "*batch d d"]:
        """Covariance of the tokens themselves: it divides by their number."""
        return self.scatter / self.count

    @classmethod
    def of(cls, rows: Tensor) -> TokenMoments:
        """Of a block of tokens, (B, d) or, with heads, (H, B, d). It is centred at its own mean, so
        a large common offset costs no digits.
        """
        rows = as_tensor(rows, "rows").double()
        count = max(rows.shape[-2], 1)
        mean = rows.sum(-2) / count
        apart = rows - mean[..., None, :]
        slip = apart.sum(-2) / count  # what rounding left of the mean
        apart = apart - slip[..., None, :]
        return cls(rows.shape[-2], mean + slip, apart.mT @ apart)

    def merge(self, other: TokenMoments) -> TokenMoments:
        """Over the tokens of both (Chan, Golub, LeVeque 1983): with n = n_a + n_b, D = m_b - m_a,

        m = m_a + n_b / n D,      S = S_a + S_b + n_a n_b / n D D^T.
        """
        if self.count == 0 or other.count == 0:
            return self if other.count == 0 else other
        count = self.count + other.count
        share, apart = other.count / count, other.mean - self.mean
        between = self.count * share * (apart[..., :, None] * apart[..., None, :])
        scatter = self.scatter + other.scatter + between
        return TokenMoments(count, self.mean + share * apart, scatter)


@dataclass(frozen=True)
class LayerMoments:
    """Streaming moments of the tokens of a layer.

    ``hidden``: of what entered it, with its ``extremes``. ``pair``: of (q, k) of each head, (H,
    2k): the query of a token and its key, which the head's key-value head has.
    """

    hidden: TokenMoments | None
    extremes: Extremes | None
    pair: TokenMoments

    @classmethod
    def of(cls, q: Tensor, k: Tensor, hidden: Tensor | None) -> LayerMoments:
        """Of a block of tokens: q (H, B, k), k (H_kv, B, k), and what entered the layer (B, d)."""
        keys = k.repeat_interleave(len(q) // len(k), dim=0)
        pair = TokenMoments.of(torch.cat([q, keys], dim=2))
        if hidden is None:
            return cls(None, None, pair)
        none = extremes.init(hidden.shape[-1], dtype=hidden.dtype)
        return cls(TokenMoments.of(hidden), extremes.update(none, hidden), pair)

    @cached_property
    def tails(self) -> TokenTails | None:
        """Which law the largest norms and coordinates of what entered the layer follow."""
        return None if self.extremes is None else extremes.finish(self.extremes)

    def merge(self, other: LayerMoments) -> LayerMoments:
        """Over the tokens of both."""
        hidden = largest = None
        if self.hidden is not None and other.hidden is not None:
            hidden = self.hidden.merge(other.hidden)
        if self.extremes is not None and other.extremes is not None:
            largest = extremes.merge(self.extremes, other.extremes)
        return LayerMoments(hidden, largest, self.pair.merge(other.pair))


def largest_variance(cov: Tensor) -> float:
    """In any direction: the norm of a covariance."""
    return float(torch.linalg.eigvalsh(cov)[-1])


STORED = (LayerInfo, LayerMoments, TokenMoments, Extremes, Deposit, Grid)


# ---- a head, and a statistic of it


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
    given: Tensor | None = None  # (m, B): scores that are known already
    whole: HeadView | None = None  # the view of all keys, where they are held
    window: WindowLayer | None = None  # of queries in their own context
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
    def weights(self) -> Tensor:
        """(m, B): softmax over these keys."""
        return torch.softmax(self.scores.double(), -1)

    @cached_property
    def outputs(self) -> Tensor | None:
        """(m, d_v): the model's own outputs, in a query's own context."""
        if self.window is None or self.rows is None:
            return None
        return self.window.outputs[self.head][self.rows]


@dataclass(frozen=True, eq=False)
class HeadEnd(Head):
    """What a statistic may know at the end."""

    session: Session
    moments: LayerMoments
    tails: TokenTails | None  # of what entered the layer
    gram: Tensor | None  # (H, k, k): W_q W_q^T where q and k are affine in what enters the layer
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

    def check(self, session: Session) -> None:
        """ValueError where the model and the text cannot give it; before weights are read."""

    def measure(self, head: HeadView) -> Numbers:
        """Numbers of each query from all of its keys. ValueError: the head cannot be measured."""
        return self.reduce(self.update(self.init(head), head), head)

    def before(self, session: Session, window: int) -> Any:
        """What passes of its own over a window find, before the one that captures it; ``measure``
        reads it in ``head.window.before``.
        """
        return None

    def in_window(self, call: AttentionCall, resting: Tensor) -> Numbers:
        """Numbers (heads, ...) from the attention of queries in their own window, whatever the pool
        is. ``resting``: which of its tokens are the first or special ones.
        """
        return {}

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        """Every declared column, and rows of declared tables only."""
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
