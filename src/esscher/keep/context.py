"""What queries see when they choose their keys: N keys in the order of their positions, and m queries that stand among them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esscher.inputs import as_attention

__all__ = ["Context"]


@dataclass(frozen=True)
class Context:
    """Checked queries (m, k), keys (N, k), values (N, d_v) of one key-value head; query i sees the keys 0 .. positions_i.

    The queries of all heads that share the keys stand below each other: a rule that decides once for all of them sums over
    the rows.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    positions: Tensor  # (m,) int64

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, scale: Any = None, positions: Any = None) -> Context:
        """``scale`` None = 1/sqrt(width of q); ``positions`` None: every query stands at the last key, and sees them all."""
        query, key, value, factor = as_attention(q, k, v, scale)
        return cls(query, key, value, factor, _positions(positions, query.shape[0], key.shape[0]).to(key.device))

    @property
    def dtype(self) -> torch.dtype:
        """What q, k and v are known in: float64, or float32 and less."""
        return torch.float64 if torch.float64 in (self.q.dtype, self.k.dtype, self.v.dtype) else torch.float32

    @property
    def keys(self) -> int:
        return self.k.shape[0]

    @cached_property
    def visible(self) -> Tensor:
        """(m, N): no key after the query."""
        return torch.arange(self.keys, device=self.k.device) <= self.positions[:, None]

    @cached_property
    def scores(self) -> Tensor:
        """(m, N) float64; -inf where the query does not see the key."""
        scores = self.q.double() @ self.k.double().T * self.scale
        if not bool(torch.isfinite(scores).all()):
            raise ValueError("q, k, scale: scores are beyond the floating range; make scale smaller")
        return scores.masked_fill(~self.visible, -torch.inf)

    @cached_property
    def attention(self) -> Tensor:
        """Softmax weights pi over the visible keys, (m, N)."""
        return torch.softmax(self.scores, 1)

    @cached_property
    def limit(self) -> Tensor:
        """Attention on all visible keys, (m, d_v)."""
        return self.attention @ self.v.double()

    @cached_property
    def distance(self) -> Tensor:
        """|c| = |value - limit|, (m, N)."""
        near = self.v.double() - self.v[0].double()  # a large common offset costs no digits
        return torch.cdist(self.attention @ near, near, compute_mode="donot_use_mm_for_euclid_dist")


def _positions(value: Any, queries: int, keys: int) -> Tensor:
    if value is None:
        return torch.full((queries,), keys - 1)
    numbers = np.asarray(value.cpu() if isinstance(value, Tensor) else value)
    if numbers.shape != (queries,) or numbers.dtype.kind not in "iu":
        raise ValueError(f"positions: expected {queries} whole numbers, one for each query, got {value!r}")
    if numbers.min() < 0 or numbers.max() >= keys:
        raise ValueError(f"positions: expected numbers from 0 to {keys - 1}, got {numbers.min()} to {numbers.max()}")
    return torch.from_numpy(numbers.astype(np.int64))
