"""Mean and covariance of tokens as a streaming state: init, update, merge.

A state holds, over the rows seen so far, their number n, their mean m and the scatter S = sum (y -
m)(y - m)^T. States a and b over disjoint rows merge exactly (Chan, Golub, LeVeque 1983): with n =
n_a + n_b and D = m_b - m_a,

    m = m_a + n_b / n D,      S = S_a + S_b + n_a n_b / n D D^T.

A block is centred at its own mean before it is merged, so a large common offset costs no digits.
States are float64 whatever the rows are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.inputs import as_tensor


@dataclass(frozen=True)
class TokenMoments:
    """State over the rows seen so far; ``batch`` axes (heads) are separate sets of rows of one
    common number.
    """

    count: int
    mean: Float64[Tensor, "*batch d"]
    scatter: Float64[Tensor, "*batch d d"]

    @property
    def cov(self) -> Float64[Tensor, "*batch d d"]:
        """Covariance of the rows themselves: it divides by their number."""
        return self.scatter / self.count


def init(d: int, batch: tuple[int, ...] = (), *, device: Any = None) -> TokenMoments:
    """The state before any row."""
    mean = torch.zeros(*batch, d, dtype=torch.float64, device=device)
    return TokenMoments(0, mean, mean.new_zeros(*batch, d, d))


def update(state: TokenMoments, rows: Any) -> TokenMoments:
    """The state after one more block of rows, (B, d) or, with heads, (H, B, d)."""
    rows = as_tensor(rows, "rows", ndim=state.mean.ndim + 1, last=state.mean.shape[-1])
    if rows.shape[:-2] != state.mean.shape[:-1]:
        raise ValueError(
            f"rows: expected {tuple(state.mean.shape[:-1])} heads before the rows, got shape"
            f" {tuple(rows.shape)}"
        )
    if rows.shape[-2] == 0:
        return state
    rows = rows.double()
    mean = rows.mean(-2)
    apart = rows - mean[..., None, :]
    slip = apart.mean(-2)  # what rounding left of the mean
    apart = apart - slip[..., None, :]
    scatter = apart.transpose(-1, -2) @ apart
    # symmetric to the last digit: half of it is all of it
    scatter = scatter.triu() + scatter.triu(1).transpose(-1, -2)
    return merge(state, TokenMoments(rows.shape[-2], mean + slip, scatter))


def merge(a: TokenMoments, b: TokenMoments) -> TokenMoments:
    """The state over the union of two disjoint sets of rows."""
    if a.count == 0 or b.count == 0:
        return a if b.count == 0 else b
    count = a.count + b.count
    share, apart = b.count / count, b.mean - a.mean
    between = a.count * share * (apart[..., :, None] * apart[..., None, :])
    return TokenMoments(count, a.mean + share * apart, a.scatter + b.scatter + between)
