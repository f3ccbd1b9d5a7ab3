"""The largest norms and coordinates of tokens, and the law their tails follow, as a state: init,
update, merge, finish.

Coordinates are told apart by size only once they are standardised, and mean and deviation are known
only at the end: the state keeps the COORDINATES largest and smallest values of *every* coordinate,
from which all standardised values |z| above

    u = the largest, over the 2 d lists, of the smallest |z| that a full list holds

are known, whatever came in which order. With every value the norm of its token is kept: it tells
the tokens apart, and tokens alike in every digit (the same word at the bottom of a model) count as
one (esscher.diagnostics.tail_comparison).

A norm is standardised by the mean and the deviation of norms; for Gaussian tokens it is then
sub-Gaussian with a scale of at most sqrt(||Sigma||) / deviation, whatever d is (the norm is
1-Lipschitz: Borell 1975; Tsirelson, Ibragimov, Sudakov 1976). The tail is the upper tenth of norms
(DuMouchel, Annals of Statistics 11, 1983), NORMS of them at most, and the upper hundredth of
coordinates, LISTED for each list at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from esscher.diagnostics.tail_comparison import Floats, TailComparison, compare
from esscher.inputs import as_tensor

__all__ = ["Extremes", "TokenTails", "finish", "init", "merge", "update"]

NORMS = 2048
COORDINATES = 64
LISTED = 16
NORM_SHARE, COORDINATE_SHARE = 10, 100  # one in so many is tail


@dataclass(frozen=True)
class Extremes:
    """State over the rows seen so far. The last place of ``mean`` and ``square`` is that of the
    norm.
    """

    count: int
    mean: Float64[Tensor, " e"]  # e = d + 1
    square: Float64[Tensor, " e"]  # sum of squares about the mean
    norms: Float64[Tensor, " m"]  # the largest, falling
    values: Float[Tensor, "2 d k"]  # of each coordinate, the largest and the smallest
    owners: Float64[Tensor, "2 d k"]  # the norms of the tokens that these are of


@dataclass(frozen=True)
class TokenTails:
    """Which law the largest norms and the largest coordinates follow."""

    norms: TailComparison
    coordinates: TailComparison


def init(d: int, *, dtype: torch.dtype = torch.float64, device: Any = None) -> Extremes:
    """The state before any row; ``dtype``: of the rows."""
    wide = {"dtype": torch.float64, "device": device}
    values = torch.empty(2, d, 0, dtype=dtype, device=device)
    return Extremes(
        0,
        torch.zeros(d + 1, **wide),
        torch.zeros(d + 1, **wide),
        torch.empty(0, **wide),
        values,
        values.double(),
    )


def update(state: Extremes, rows: Any) -> Extremes:
    """The state after one more block of rows (B, d)."""
    rows = as_tensor(rows, "rows", ndim=2, last=len(state.mean) - 1)
    if not len(rows):
        return state
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    wide, across = rows.double(), rows.T.contiguous()
    centre, centre_norm = wide.mean(0), norms.mean()
    mean = torch.cat([centre, centre_norm[None]])
    square = torch.cat(
        [(wide - centre).square_().sum(0), (norms - centre_norm).square().sum()[None]]
    )
    largest, smallest = (
        across.topk(min(COORDINATES, len(rows)), largest=largest) for largest in (True, False)
    )
    values = torch.stack([largest.values, smallest.values]).to(state.values.dtype)
    owners = norms[torch.stack([largest.indices, smallest.indices])]
    top = norms.topk(min(NORMS, len(rows))).values
    return merge(state, Extremes(len(rows), mean, square, top, values, owners))


def merge(a: Extremes, b: Extremes) -> Extremes:
    """The state over the union of two disjoint sets of rows."""
    if a.mean.shape != b.mean.shape:
        raise ValueError(
            f"merge: expected states of one width, got {len(a.mean) - 1} and {len(b.mean) - 1}"
        )
    if a.count == 0 or b.count == 0:
        return a if b.count == 0 else b
    count = a.count + b.count
    apart = b.mean - a.mean
    square = a.square + b.square + a.count * b.count / count * apart.square()
    norms = torch.cat([a.norms, b.norms])
    values, owners = torch.cat([a.values, b.values], dim=2), torch.cat([a.owners, b.owners], dim=2)
    size = min(COORDINATES, values.shape[2])
    chosen = torch.stack([values[side].topk(size, largest=side == 0).indices for side in (0, 1)])
    return Extremes(
        count,
        a.mean + b.count / count * apart,
        square,
        norms.topk(min(NORMS, len(norms))).values,
        values.gather(2, chosen),
        owners.gather(2, chosen),
    )


def finish(state: Extremes) -> TokenTails:
    """Both laws fitted to the largest norms and to the largest coordinates."""
    if state.count == 0:
        raise ValueError("finish: the state has seen no row; update it first")
    mean, deviation = state.mean.cpu().numpy(), np.sqrt(state.square.cpu().numpy() / state.count)
    # a coordinate that varies by rounding alone has no tail
    varies = deviation > 1e-12 * np.abs(mean)
    norms = (state.norms.cpu().numpy() - mean[-1]) / deviation[-1] if varies[-1] else np.zeros(0)
    of_norms = _tail(norms, state.norms.cpu().numpy()[: len(norms)], state.count // NORM_SHARE)
    values = state.values.double().cpu().numpy()[:, varies[:-1]]
    centre, scale = mean[:-1][varies[:-1], None], deviation[:-1][varies[:-1], None]
    z = np.stack([values[0] - centre, centre - values[1]]) / scale
    listed = z.shape[1] * 2 * LISTED
    floor = float(z.min(axis=2).max()) if z.size and z.shape[2] < state.count else 0.0
    wanted = min(state.count * z.shape[1] // COORDINATE_SHARE, listed)
    of_coordinates = _tail(
        z.ravel(), state.owners.cpu().numpy()[:, varies[:-1]].ravel(), wanted, floor
    )
    return TokenTails(of_norms, of_coordinates)


def _tail(z: Floats, owners: Floats, wanted: int, floor: float = 0.0) -> TailComparison:
    """The comparison over the ``wanted`` largest values above the next, and above the floor."""
    wanted = min(wanted, len(z) - 1)
    threshold = (
        max(floor, float(np.partition(z, len(z) - wanted - 1)[len(z) - wanted - 1]))
        if wanted > 0
        else floor
    )
    return compare(z, threshold, np.unique(owners, return_inverse=True)[1])
