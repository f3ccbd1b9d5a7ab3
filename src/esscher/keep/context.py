"""What queries see when they choose their keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from esscher.inputs import as_attention

OF_QUERIES = ("q", "positions", "mask", "logits", "heads", "sink", "norm", "slope")


@dataclass(frozen=True)
class Context:
    """Checked queries (m, k), keys (N, k), values (N, d_v) of one key-value head; query i sees the
    keys 0 .. positions_i, or what ``mask`` says.

    The queries of all heads that share the keys stand below each other: a rule that decides once
    for all of them sums over the rows. ``logits``: the model's own scores, where they are more than
    scale <q, k>. ``heads``: the head of each row; ``output``: W_O of each head. ``sink``: a logit
    of each row that is in the softmax without a key, as in gpt_oss: a key of value 0 that rules
    neither see, count nor drop. ``choosers``: the queries, over the same keys, that choose for all,
    where others are judged. ``base``, ``columns``: of a context made by ``restrict``, the context
    of all keys, and which of them these are.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    positions: Tensor  # (m,) int64
    mask: Tensor | None = None  # (m, N) bool
    logits: Tensor | None = None  # (m, N)
    heads: Tensor | None = None  # (m,) int64
    output: Tensor | None = None  # (heads, d_v, d)
    sink: Tensor | None = None  # (m,)
    metric: Tensor | None = None  # (heads, d_v, d_v)
    norm: Tensor | None = None  # (m,)
    slope: Tensor | None = None  # (m,)
    choosers: Context | None = None
    base: Context | None = None
    columns: Tensor | None = None  # (N,) int64, rising

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, scale: Any = None, positions: Any = None) -> Context:
        """A context of checked tensors; ``scale`` None = 1/sqrt(width of q), ``positions`` None:
        every query stands at the last key.
        """
        query, key, value, factor = as_attention(q, k, v, scale)
        places = _positions(positions, len(query), len(key)).to(key.device)
        return cls(query, key, value, factor, places)

    @property
    def dtype(self) -> torch.dtype:
        """float64 where q, k or v is, else float32."""
        double = torch.float64 in (self.q.dtype, self.k.dtype, self.v.dtype)
        return torch.float64 if double else torch.float32

    @property
    def choosing(self) -> Context:
        """The queries that choose one set of keys for all."""
        return self if self.choosers is None else self.choosers

    def restrict(self, columns: Tensor) -> Context:
        """The same queries where a rule may drop some of the keys only, those of a cache: weights
        and limits stay those of all keys.
        """
        place = torch.searchsorted(columns, self.positions, right=True) - 1
        # the first keys are a view, any others a copy
        first = len(columns) and int(columns[-1]) == len(columns) - 1
        at = slice(len(columns)) if first else columns
        mask, logits = (None if x is None else x[:, at] for x in (self.mask, self.logits))
        return replace(
            self,
            k=self.k[at],
            v=self.v[at],
            positions=place.clamp_min(0),
            mask=mask,
            logits=logits,
            base=self,
            columns=columns,
        )

    def take(self, rows: Tensor) -> Context:
        """The same keys for some of the queries."""
        known: dict[str, Any] = {name: getattr(self, name) for name in OF_QUERIES}
        some = {name: x[rows] for name, x in known.items() if x is not None}
        return replace(self, **some, base=None if self.base is None else self.base.take(rows))

    @property
    def keys(self) -> int:
        return self.k.shape[0]

    @property
    def index(self) -> Tensor:
        """0, 1, ..., N - 1."""
        return torch.arange(self.keys, device=self.k.device)

    @cached_property
    def visible(self) -> Tensor:
        """(m, N): no key after the query, or what the mask says."""
        if self.mask is not None:
            return self.mask
        return self.index <= self.positions[:, None]

    @cached_property
    def scores(self) -> Tensor:
        """(m, N) float64; -inf where the query does not see the key."""
        scores = (
            self.q.double() @ self.k.double().T * self.scale
            if self.logits is None
            else self.logits.double()
        )
        if not bool(torch.isfinite(scores).all()):
            raise ValueError(
                "q, k, scale: scores are beyond the floating range; make scale smaller"
            )
        return scores.masked_fill(~self.visible, -torch.inf)

    @property
    def whole(self) -> Context:
        """For sums over all that is in the softmax: keys outside a restricted context, and the sink
        logit as one more key, the last.
        """
        if self.base is not None:
            return self.base.whole
        return self if self.sink is None else self._with_sink

    @cached_property
    def _with_sink(self) -> Context:
        assert self.sink is not None
        logits = torch.cat([self.scores, self.sink.double()[:, None]], 1)
        mask = pad(self.visible, (0, 1), value=True)
        return replace(
            self,
            k=pad(self.k, (0, 0, 0, 1)),
            v=pad(self.v, (0, 0, 0, 1)),
            mask=mask,
            logits=logits.masked_fill(~mask, 0.0),
            sink=None,
        )

    @cached_property
    def inside(self) -> Tensor:
        """Which keys of ``whole`` these are, (N,)."""
        return self.index if self.columns is None else self.columns

    @cached_property
    def attention(self) -> Tensor:
        """Softmax weights pi of the visible keys, (m, N)."""
        if self.whole is self:
            return torch.softmax(self.scores, 1)
        return self.whole.attention[:, self.inside]

    @cached_property
    def softmax(self) -> Tensor:
        """Weights (m, N') of everything in the softmax, in the precision of the inputs."""
        whole = self.whole
        if whole.logits is None:
            scores = (whole.q.to(self.dtype) * whole.scale) @ whole.k.to(self.dtype).T
        else:
            scores = whole.logits.to(self.dtype, copy=True)
        if whole.mask is not None:
            scores.masked_fill_(~whole.mask, -torch.inf)
        else:  # up to the first of the queries, all see every key
            later = slice(int(whole.positions.min()) + 1, None)
            unseen = whole.index[later] > whole.positions[:, None]
            scores[:, later].masked_fill_(unseen, -torch.inf)
        return torch.softmax(scores, 1)

    @cached_property
    def attended(self) -> Tensor:
        """The output of the queries, (m, d_v), in the precision of the inputs."""
        return self.softmax @ self.whole.v.to(self.dtype)

    @cached_property
    def near(self) -> Tensor:
        """Values measured from one of them, (N, d_v): a large common offset costs no digits."""
        return self.v.double() - self.v[len(self.v) // 2].double()

    @cached_property
    def drift(self) -> Tensor:
        """The limit measured from that value, (m, d_v)."""
        if self.whole is not self:
            return self.whole.limit - self.v[len(self.v) // 2].double()
        return self.attention @ self.near

    @cached_property
    def limit(self) -> Tensor:
        """Attention on all visible keys, (m, d_v)."""
        return self.drift + self.v[len(self.v) // 2].double()

    @cached_property
    def distance(self) -> Tensor:
        """|c| = |value - limit|, (m, N)."""
        if self.dtype == torch.float64:
            return torch.cdist(self.drift, self.near, compute_mode="donot_use_mm_for_euclid_dist")
        # float32 values are known no better than this difference of squares in float64, which costs
        # a fifth
        inner = self.drift @ self.near.T
        square = self.near.square().sum(1) - 2 * inner + self.drift.square().sum(1, keepdim=True)
        return square.clamp_(min=0).sqrt_()

    @cached_property
    def gain(self) -> Tensor:
        """What keys count that are kept by chance, (m, N): pi |c|, the first order; of a key
        with more than half of the weight pi |c| / (1 - pi), which is exact for its loss, where c /
        (1 - pi) is measured as the value's distance from the limit of the others.
        """
        whole = self.whole
        found = whole.attention * whole.distance
        weight, top = whole.attention[:, self.inside].max(1)
        top = self.inside[top]
        rows = (weight > 0.5).nonzero()[:, 0]
        if len(rows):
            others = whole.scores[rows].scatter(1, top[rows, None], -torch.inf)
            alone = (others == -torch.inf).all(1, keepdim=True)  # it sees no other key
            limit = torch.softmax(others.masked_fill(alone, 0.0), 1) @ whole.near
            away = whole.near[top[rows]] - limit
            found[rows, top[rows]] = weight[rows] * away.norm(dim=1)
        return found if whole is self else found[:, self.inside]


def _positions(value: Any, queries: int, keys: int) -> Tensor:
    if value is None:
        return torch.full((queries,), keys - 1)
    numbers = np.asarray(value.cpu() if isinstance(value, Tensor) else value)
    fits = numbers.shape == (queries,) and numbers.dtype.kind in "iu"
    if not fits or numbers.min() < 0 or numbers.max() >= keys:
        raise ValueError(
            f"positions: expected {queries} whole numbers from 0 to {keys - 1}, one for each query,"
            f" got {value!r}"
        )
    return torch.from_numpy(numbers.astype(np.int64))
