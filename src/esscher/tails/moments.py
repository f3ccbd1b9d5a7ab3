"""Mean, covariance, kurtosis and extremes of tokens as a streaming state: init, update, merge,
finish.

A state holds, over the rows seen so far, their number n, their mean m, the scatter S = sum (y -
m)(y - m)^T and, per coordinate, the sums T = sum (y - m)^3 and Q = sum (y - m)^4. States a and b
over disjoint rows merge exactly; with n = n_a + n_b, u = n_a / n, w = n_b / n and D = m_b - m_a,

    m = m_a + w D,      S = S_a + S_b + n_a w D D^T,
    T = T_a + T_b + n_a w (u - w) D^3 + 3 D (u S_b - w S_a),
    Q = Q_a + Q_b + n_a w (u^2 - u w + w^2) D^4 + 6 D^2 (u^2 S_b + w^2 S_a) + 4 D (u T_b - w T_a),

S in the last two being its diagonal (Chan, Golub, LeVeque 1983; Pébay 2008, SAND2008-6212). A block
is centred at its own mean before it is merged, so a large common offset costs no digits. States are
float64 whatever the rows are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.special
import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.inputs import as_tensor

HEAVY_EXCESS = 1.0  # excess kurtosis of a coordinate above which it counts as heavy
LIGHT_EXCESS = -0.5  # and below which it counts as light; a uniform law has -1.2
HEAVY_SHARE = 0.05  # share of heavy coordinates that makes the tokens heavy
ALARM = 1e-3  # chance at which a Gaussian sample shows a larger extreme


@dataclass(frozen=True)
class Higher:
    """Per coordinate: sums of third and fourth powers about the mean, and the extremes."""

    third: Float64[Tensor, "*batch d"]
    fourth: Float64[Tensor, "*batch d"]
    low: Float64[Tensor, "*batch d"]
    high: Float64[Tensor, "*batch d"]


@dataclass(frozen=True)
class TokenMoments:
    """State over the rows seen so far; ``batch`` axes (heads) are separate sets of rows of one
    common number.
    """

    count: int
    mean: Float64[Tensor, "*batch d"]
    scatter: Float64[Tensor, "*batch d d"]
    higher: Higher | None  # None in the light mode: mean and covariance alone


@dataclass(frozen=True)
class TokenSummary:
    """What a state says of the law of its tokens. ``cov`` divides by the count: the covariance of
    the pool itself.
    """

    count: int
    mean: Float64[Tensor, "*batch d"]
    cov: Float64[Tensor, "*batch d d"]
    # 3 for a Gaussian; NaN where a coordinate is constant
    kurtosis: Float64[Tensor, "*batch d"] | None
    largest_z: Float64[Tensor, "*batch"] | None  # largest |y - mean| / sd over rows and coordinates
    gaussian_z: float  # the median of that for as many independent Gaussian rows and coordinates
    verdict: str  # sub-Gaussian, heavier, lighter, or unknown
    reason: str


def init(
    d: int, batch: tuple[int, ...] = (), *, higher: bool = True, device: Any = None
) -> TokenMoments:
    """The state before any row. ``higher=False`` is the light mode for queries and keys: mean and
    covariance alone.
    """
    zeros = torch.zeros(*batch, d, dtype=torch.float64, device=device)
    scatter = torch.zeros(*batch, d, d, dtype=torch.float64, device=device)
    far = torch.full_like(zeros, torch.inf)
    return TokenMoments(0, zeros, scatter, Higher(zeros, zeros, far, -far) if higher else None)


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
    higher = None
    if state.higher is not None:
        third, fourth = (apart.square() * apart).sum(-2), apart.square().square().sum(-2)
        higher = Higher(third, fourth, rows.amin(-2), rows.amax(-2))
    return merge(state, TokenMoments(rows.shape[-2], mean + slip, scatter, higher))


def merge(a: TokenMoments, b: TokenMoments) -> TokenMoments:
    """The state over the union of two disjoint sets of rows."""
    if a.count == 0 or b.count == 0:
        return a if b.count == 0 else b
    count = a.count + b.count
    u, w = a.count / count, b.count / count
    apart = b.mean - a.mean
    pair = a.count * w
    mean = a.mean + w * apart
    scatter = a.scatter + b.scatter + pair * (apart[..., :, None] * apart[..., None, :])
    if a.higher is None or b.higher is None:
        return TokenMoments(count, mean, scatter, None)
    x, y = a.higher, b.higher
    spread_a, spread_b = (state.scatter.diagonal(dim1=-2, dim2=-1) for state in (a, b))
    third = x.third + y.third + pair * (u - w) * apart**3
    third = third + 3 * apart * (u * spread_b - w * spread_a)
    fourth = x.fourth + y.fourth + pair * (u * u - u * w + w * w) * apart**4
    fourth = fourth + 6 * apart**2 * (u * u * spread_b + w * w * spread_a)
    fourth = fourth + 4 * apart * (u * y.third - w * x.third)
    low, high = torch.minimum(x.low, y.low), torch.maximum(x.high, y.high)
    return TokenMoments(count, mean, scatter, Higher(third, fourth, low, high))


def finish(state: TokenMoments) -> TokenSummary:
    """Mean, covariance, shape and extremes of the rows seen, with a verdict on how heavy their
    tails are.
    """
    if state.count == 0:
        raise ValueError("finish: the state has seen no row; update it first")
    count, mean, cov = state.count, state.mean, state.scatter / state.count
    gaussian = gaussian_largest(count * mean.shape[-1])
    if state.higher is None:
        reason = "The light mode keeps mean and covariance alone."
        return TokenSummary(count, mean, cov, None, None, gaussian, "unknown", reason)
    variance = cov.diagonal(dim1=-2, dim2=-1)
    # a coordinate that varies by rounding alone has no shape
    constant = variance <= (1e-12 * mean.abs()).square()
    sd = variance.masked_fill(constant, torch.nan).sqrt()
    kurtosis = state.higher.fourth / count / sd**4
    extreme = torch.maximum(state.higher.high - mean, mean - state.higher.low) / sd
    largest = extreme.nan_to_num(0.0).amax(-1)
    verdict, reason = "unknown", "Several heads have no common verdict."
    if kurtosis.ndim == 1:
        verdict, reason = _judge(kurtosis, float(largest), count)
    return TokenSummary(count, mean, cov, kurtosis, largest, gaussian, verdict, reason)


def gaussian_largest(numbers: int, chance: float = 0.5) -> float:
    """The quantile at ``chance`` of the largest |z| among so many independent standard normal
    numbers:

    (2 Phi(z) - 1)^numbers = chance. By Sidak's inequality dependent coordinates show smaller
    extremes, never larger.
    """
    tail = -math.expm1(math.log(chance) / numbers)  # chance that one |z| is beyond
    return float(-scipy.special.ndtri(tail / 2))


def _judge(kurtosis: Tensor, largest: float, count: int) -> tuple[str, str]:
    numbers = count * len(kurtosis)
    excess = kurtosis[~kurtosis.isnan()].cpu().numpy() - 3.0
    if count < 8 or excess.size == 0:
        varying = f"{count} rows with {excess.size} coordinates that vary"
        return "unknown", f"{varying} are too few to judge a tail."
    noise = 3.0 * math.sqrt(24.0 / count)  # three standard errors of a Gaussian sample's kurtosis
    limit = max(HEAVY_EXCESS, noise)
    heavy = float((excess > limit).mean())
    facts = (
        f"{heavy:.1%} of coordinates have excess kurtosis above {limit:.2g} (median"
        f" {np.median(excess):.2f}), and the largest deviation is {largest:.1f} standard"
        f" deviations where Gaussian rows would show {gaussian_largest(numbers):.1f}"
    )
    if heavy > HEAVY_SHARE:
        return "heavier", f"Heavier tails than a Gaussian: {facts}."
    if largest > gaussian_largest(numbers, 1.0 - ALARM):
        return "heavier", f"Heavier tails than a Gaussian, in few coordinates or rows: {facts}."
    if float(np.median(excess)) < min(LIGHT_EXCESS, -noise):
        return "lighter", f"Lighter tails than a Gaussian: {facts}."
    return "sub-Gaussian", f"Tails like a Gaussian's: {facts}."
