"""All n for one pass over the keys: deposits on a score grid as a streaming state (init, update,
merge, finish).

Every functional of esscher.errors.integral is sum_j h(tau + s_j) v_j with h smooth and v_j among 1,
the value and its squared norm: a convolution of the keys' measure with h. So each key is deposited
once, on its query's score grid, by B-spline weights that do not know h (esscher.errors.scatter);
every h, tau and n is then a small matrix product shared by all queries. Deposits are sums over
keys, hence two states over disjoint keys merge by addition, in any order.

Cells lie at whole multiples of the spacing, the same for every query and every state. A state
keeps, for each query, the cells from its lowest score to its highest, in float64; memory does not
depend on the number of keys. A range that needs more than MAX_CELLS is refused: those queries
belong to error_from_nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.errors.curve import QueryErrors, side_by_side
from esscher.errors.integral import (
    TINY,
    Family,
    Source,
    bernoulli_errors,
    replacement_errors,
    step_for,
)
from esscher.errors.scatter import (
    coarsen,
    exponential_gain,
    interpolation_error,
    scatter,
    spline_coefficients,
)

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

LENGTHS = 128  # remembered kernels have a multiple of so many cells
LONGEST = 512  # and at most so many
MAX_CELLS = 4096  # of one query: 512 nats of score range at the spacing 1/8
FAR = 2.0**40  # scores from here on have no cell numbers, nor digits behind the point in float32
ALIGN = 8  # every grid ends on a multiple of this, so that 1/32 can be coarsened to 1/4
COARSEST = 0.25  # beyond it a kernel that grows as exp(u) has no B-spline coefficients
ROUNDING = 16 * torch.finfo(torch.float64).eps  # of a sum over keys, relative to absolute terms


@dataclass(frozen=True)
class Grid:
    """``spacing`` (a power of 2) of the cells, ``points`` (4 or 8) a key is spread over, ``tol`` of
    the quadrature.
    """

    spacing: float
    points: int
    tol: float

    @property
    def single(self) -> bool:
        """Whether values are known to float32 only."""
        return self.tol > 1e-8

    def centres(self, length: int, device: torch.device) -> Tensor:
        """Of the last cells, measured from the end of the grid."""
        index = torch.arange(-length, 0, dtype=torch.float64, device=device)
        return (index + self.points / 2) * self.spacing


# channel, coefficients (cells, nodes) divided by a peak, and the peak (nodes)
_Kernel = tuple[str, Tensor, Tensor | float]


def _kernels(family: Family, grid: Grid, length: int, tau: Tensor) -> dict[str, _Kernel]:
    """Those of a family on the last ``length`` cells of a grid, at nodes tau."""
    padded = -(-length // LENGTHS) * LENGTHS
    compute = _computed if length <= LONGEST else _computed.__wrapped__  # not remembered
    found = compute(family, grid, padded, tuple(tau.tolist()), tau.device)
    return {name: (channel, x[-length:], peak) for name, (channel, x, peak) in found.items()}


@lru_cache(maxsize=512)  # a fifth of a megabyte each
def _computed(
    family: Family, grid: Grid, length: int, nodes: tuple[float, ...], device: torch.device
) -> dict[str, _Kernel]:
    tau = torch.tensor(nodes, dtype=torch.float64, device=device)
    found: dict[str, _Kernel] = {}
    coefficients = spline_coefficients(
        lambda centres: family(tau[:, None] + centres, tau[:, None]),
        grid.centres(length, device),
        grid.points,
        grid.spacing,
    )
    for name, (channel, weights) in coefficients.items():
        if channel == "value" and grid.single:
            peak = weights.abs().amax(0).clamp_min(TINY)  # float32 has few small numbers
            found[name] = channel, (weights / peak).float(), peak
        else:
            found[name] = channel, weights, 1.0
    return found


class DepositSource(Source):
    """A source over the cells of a deposit, anchored at the end of each query's grid.

    The limit and all moments are those of the deposited measure itself, so that E[e c] = 0 holds to
    rounding: what the grid gets wrong is relative to |c|, even where one key takes nearly all the
    weight and its c nearly vanishes.
    """

    chunk = 24

    def __init__(self, cells: Tensor, grid: Grid, center: Tensor) -> None:
        self.cells, self.grid, self.center = cells, grid, center
        self.span = cells.shape[2] * grid.spacing
        first, pair = self._exponential(1.0), self._exponential(2.0)
        drift = (cells[:-2] @ first).T / (cells[-2] @ first)[:, None]  # limit - center
        self.drift, self.limit = drift, center + drift
        self.total = cells[-2].sum(1, keepdim=True)  # weight of all keys, (m, 1)
        self.mass = cells[-2] / self.total  # deposits of 1 under the law of a key, (m, L)
        along = torch.einsum("md,dml->ml", drift, cells[:-2])
        square = cells[-1] - 2 * along + drift.square().sum(1, keepdim=True) * cells[-2]
        # deposits of |c|^2 + b, (m, L); what rounding leaves below 0 is 0
        self.spread = square.clamp_min(0) / self.total
        self.mean = cells[:-2].sum(2).T / self.total - drift
        self.variance = self.spread.sum(1)
        self.log_first, self.log_pair = (self.mass @ first).log(), (self.mass @ pair).log()
        self.log_spread = (self.spread @ pair).clamp_min(0).log()
        self.largest = torch.where(self.mass > 0, self.spread / self.mass, 0.0).amax(1)
        self._coarser: dict[int, DepositSource] = {}

    def coarser(self, times: int) -> DepositSource:
        """The source over the same deposits with the spacing doubled so many times."""
        if times == 0:
            return self
        if times not in self._coarser:
            finer = self.coarser(times - 1)
            self._coarser[times] = DepositSource(
                coarsen(finer.cells, finer.grid.points),
                replace(finer.grid, spacing=2 * finer.grid.spacing),
                self.center,
            )
        return self._coarser[times]

    @cached_property
    def rounding(self) -> tuple[Tensor, Tensor]:
        """Bounds on the rounding of the mean squared error at n = 1 and, times n, as n grows, (2,
        m), and these errors themselves.

        |c|^2 is the difference of numbers of the size of |value - centre|^2 and |drift|^2. Where
        one key has nearly all the weight its c nearly vanishes, and what is left of it is rounding.
        """
        length = self.drift.square().sum(1, keepdim=True)
        size = (self.cells[-1] + length * self.cells[-2]) / self.total
        grown = (size @ self._exponential(2.0)) / (2 * self.log_first).exp()
        bounds = ROUNDING * torch.stack([size.sum(1), grown])
        return bounds, torch.stack([self.variance, self.delta])

    @cached_property
    def value(self) -> Tensor:
        """Deposits of c / ``unit``, (d, m, L): rounded to float32 when the values themselves are
        known no better.
        """
        dtype = torch.float32 if self.grid.single else torch.float64
        value = torch.empty_like(self.cells[:-2], dtype=dtype)
        size = self.total * self.unit
        # one coordinate stays in the cache
        for own, cells, drift in zip(value, self.cells, self.drift.T, strict=False):
            own.copy_(torch.addcmul(cells, drift[:, None], self.cells[-2], value=-1).div_(size))
        return value

    @cached_property
    def unit(self) -> float:
        """The size of the values, a power of 2 taken out of them: float32 has few small numbers."""
        size = math.sqrt(float((self.cells[-1].sum(1) / self.total[:, 0]).max()))
        return 2.0 ** math.frexp(size)[1] if size > 0 else 1.0

    def contract(self, tau: Tensor, family: Family) -> dict[str, Tensor]:
        found = {}
        for name, (channel, weights, peak) in _kernels(
            family, self.grid, self.cells.shape[2], tau
        ).items():
            if channel == "value":
                found[name] = (self.value @ weights).double().mul_(peak * self.unit)
            else:
                found[name] = (self.mass if channel == "mass" else self.spread) @ weights
        return found

    def _exponential(self, rate: float) -> Tensor:
        """Coefficients of exp(rate u), which are exact."""
        gain = exponential_gain(self.grid.points, rate * self.grid.spacing)
        return torch.exp(rate * self.grid.centres(self.cells.shape[2], self.cells.device)) / gain


@dataclass(frozen=True)
class Deposit:
    """State over the keys seen so far. Channels: d_v coordinates of value - ``center``, weight,
    |value - center|^2.
    """

    grid: Grid
    center: Tensor  # (d_v,) float64: near the values, so that a large common offset costs no digits
    # (d_v + 2, m, L) float64; the last cell of query i is number end_i - 1, L the longest range
    cells: Tensor
    first: Tensor  # (m,) int64: the lowest cell that a key reaches
    end: Tensor  # (m,) int64: past the highest, rounded up to ALIGN
    keys: Tensor  # (m,) int64: how many each query has seen

    @cached_property
    def source(self) -> DepositSource:
        """What the integrals read; its moments are computed once."""
        return DepositSource(self.cells, self.grid, self.center)


@dataclass(frozen=True)
class Extent:
    """Where the cells of each query lie, the ``largest`` absolute score of a block, and whether
    some keys are not seen.
    """

    first: Tensor
    end: Tensor
    largest: float = 0.0
    partial: bool = False

    @property
    def cells(self) -> int:
        """Length of the longest range."""
        return int((self.end - self.first).max().clamp_min(0))


def choose_grid(dtype: torch.dtype, sampling: str) -> Grid:
    """float32: relative error of the mean squared error about 1e-5; float64: about 1e-10.

    Keeping a fraction f near 1 makes the kernels sharp, analytic only within atan(pi /
    log(f/(1-f))): finer cells.
    """
    if dtype == torch.float64:
        return Grid(1 / 8 if sampling == "replacement" else 1 / 32, 8, 1e-10)
    return Grid(1 / 8, 4, 1e-6) if sampling == "replacement" else Grid(1 / 16, 8, 1e-6)


def init(queries: int, grid: Grid, center: Tensor) -> Deposit:
    """The state of so many queries before any key; ``center`` (d_v,) says the device."""
    center = center.double()
    cells = torch.zeros(center.shape[0] + 2, queries, 0, dtype=torch.float64, device=center.device)
    far = torch.full((queries,), 2**60, dtype=torch.int64, device=center.device)
    return Deposit(grid, center, cells, far, -far, torch.zeros_like(far))


def update(
    state: Deposit,
    scores: Tensor,
    values: Tensor,
    extent: Extent | None = None,
    owned: bool = False,
) -> Deposit:
    """The state after one more block of keys: scores (m, B), values (B, d_v).

    ``extent``: what ``reach`` says of the scores, where it is known already. ``owned``: the caller
    has no further use for the old state, so its cells may be written to: long streams then leave no
    trail of copies in memory.
    """
    extent = reach(state, scores) if extent is None else extent
    if not extent.largest < FAR:  # or NaN
        raise ValueError(
            f"scores: expected numbers below {FAR:.0e} in size, got {extent.largest:g}; make scale"
            " smaller"
        )
    if extent.cells > MAX_CELLS:
        raise ValueError(
            f"scores: a range of {extent.cells * state.grid.spacing:.0f} nats for one query is"
            f" wider than the grid's {MAX_CELLS * state.grid.spacing:.0f}; use error_from_nodes,"
            " which has no grid"
        )
    fits = owned and torch.equal(state.first, extent.first) and torch.equal(state.end, extent.end)
    state = state if fits else _reframe(state, extent)
    rows = values.double() - state.center
    square = rows.square().sum(1)
    rows = torch.cat([rows, torch.ones_like(square)[:, None], square[:, None]], dim=1)
    scatter(
        scores,
        rows,
        state.end - state.cells.shape[2],
        state.cells,
        state.grid.spacing,
        state.grid.points,
    )
    seen = (scores > -torch.inf).sum(1) if extent.partial else scores.shape[1]
    return replace(state, keys=state.keys + seen)


def merge(a: Deposit, b: Deposit) -> Deposit:
    """The state over the union of two disjoint sets of keys, seen by the same queries."""
    if a.grid != b.grid or a.cells.shape[:2] != b.cells.shape[:2]:
        raise ValueError(
            f"merge: expected states of one grid and the same queries, got {a.grid} with"
            f" {tuple(a.cells.shape[:2])} and {b.grid} with {tuple(b.cells.shape[:2])}"
        )
    b = recentre(b, a.center)
    extent = Extent(torch.minimum(a.first, b.first), torch.maximum(a.end, b.end))
    a, b = _reframe(a, extent), _reframe(b, extent)
    return replace(a, cells=a.cells + b.cells, keys=a.keys + b.keys)


def without(state: Deposit, scores: Tensor, values: Tensor) -> Deposit:
    """The state without keys that it has seen: their scores (m, B) and values (B, d_v). Deposits
    subtract as they add.
    """
    gone = update(init(len(state.keys), state.grid, state.center), scores, values, owned=True)
    gone = _reframe(gone, Extent(state.first, state.end))
    return replace(state, cells=state.cells - gone.cells, keys=state.keys - gone.keys)


def reach(state: Deposit, scores: Tensor) -> Extent:
    """Where the state's grids would lie after a block with these scores; -inf: a key that a query
    does not see. A query that sees none of the block stays where it is.
    """
    low, high = scores.amin(1), scores.amax(1)
    partial = bool((low == -torch.inf).any())
    some = high != -torch.inf
    if partial:
        low = torch.where(scores > -torch.inf, scores, torch.inf).amin(1)
        low, high = (torch.where(some, edge, 0.0) for edge in (low, high))
    spacing = state.grid.spacing
    first = (low.double() / spacing).floor().long() - (state.grid.points - 1)
    end = ((high.double() / spacing).floor().long() // ALIGN + 1) * ALIGN
    largest = float(torch.maximum(low.abs(), high.abs()).max())  # NaN or infinite where a score is
    return Extent(
        torch.where(some, torch.minimum(first, state.first), state.first),
        torch.where(some, torch.maximum(end, state.end), state.end),
        largest,
        partial,
    )


def finish(
    state: Deposit,
    n: Counts,
    sampling: str = "replacement",
    *,
    details: bool = False,
) -> QueryErrors:
    """The exact errors of the pool of all keys seen, at every n; ``accuracy`` includes ten times
    the error of interpolation on the grid.

    "bernoulli" keeps each key with probability f = n / the mean number of keys: where queries have
    seen different numbers of keys, f is the same for all of them.
    """
    if not bool((state.keys > 0).all()):
        raise ValueError("finish: a query of the state has seen no key; update it first")
    of = round(float(state.keys.double().mean()))
    source, grid = state.source, state.grid
    step, tol = step_for(grid.tol), grid.tol
    strips = [math.pi / 2] * len(n)
    if sampling == "replacement":
        counts = torch.as_tensor(n, dtype=torch.float64, device=state.cells.device)
        result = replacement_errors(source, counts, step=step, tol=tol, details=details)
        levels = [0] * len(n)
    else:
        strips = [strip_of(count / of) for count in n.tolist()]
        levels = [level_for(grid, strip) for strip in strips]
        result = side_by_side(
            [
                bernoulli_errors(source.coarser(level), count, of, state.keys, step=step, tol=tol)
                for count, level in zip(n.tolist(), levels, strict=True)
            ]
        )
    apart = (
        interpolation_error(grid.points, grid.spacing * 2**level, strip)
        for level, strip in zip(levels, strips, strict=True)
        if strip > 0
    )
    rounding, sizes = (x.sum(1) for x in source.rounding)
    lost = float(torch.where(rounding > 0, rounding / sizes, 0.0).max())
    return replace(result, accuracy=result.accuracy + (lost + 10 * max(apart, default=0.0)) / 2)


def lost(state: Deposit) -> Tensor:
    """What rounding may take of each query's mean squared error, relative to it, (m,): near 1
    nothing is left.
    """
    rounding, sizes = state.source.rounding
    return torch.where(rounding > 0, rounding / sizes, 0.0).amax(0)


def strip_of(fraction: float) -> float:
    """Kernels of a kept fraction are analytic within this |Im u|; 0 where every key is kept."""
    odds = math.log(fraction / (1 - fraction)) if fraction < 1 else math.inf
    return math.atan2(math.pi, odds) if odds > 0 else math.pi / 2


def level_for(grid: Grid, strip: float) -> int:
    """How often the spacing may be doubled before kernels analytic within this strip suffer."""
    level, spacing = 0, 2 * grid.spacing
    while spacing <= COARSEST and strip > 0:
        if interpolation_error(grid.points, spacing, strip) > grid.tol / 10:
            break
        level, spacing = level + 1, 2 * spacing
    return level


def take(state: Deposit, rows: Tensor) -> Deposit:
    """The deposits of these queries, in this order."""
    return replace(
        state,
        cells=state.cells[:, rows],
        first=state.first[rows],
        end=state.end[rows],
        keys=state.keys[rows],
    )


def _reframe(state: Deposit, extent: Extent) -> Deposit:
    """The same deposits in another frame, cut off where that ends. Always a copy."""
    old, length = state.cells.shape[2], extent.cells
    cells = state.cells.new_zeros(*state.cells.shape[:2], length)
    if old:
        # the old number of cell 0 of the new frame
        shifts = (extent.end - length - (state.end - old)).tolist()
        for i, shift in enumerate(shifts):
            start, stop = max(shift, 0), min(shift + length, old)
            if start < stop:
                cells[:, i, start - shift : stop - shift] = state.cells[:, i, start:stop]
    return replace(state, cells=cells, first=extent.first, end=extent.end)


def recentre(state: Deposit, center: Tensor) -> Deposit:
    """The same deposits, values measured from another centre: |v - c'|^2 = |v - c|^2 + 2 <v - c, c
    - c'> + |c - c'|^2.
    """
    shift = state.center - center
    if not bool(shift.any()):
        return state
    value, mass, square = state.cells[:-2], state.cells[-2:-1], state.cells[-1:]
    square = (
        square
        + 2 * (shift[:, None, None] * value).sum(0, keepdim=True)
        + shift.square().sum() * mass
    )
    return replace(
        state, cells=torch.cat([value + shift[:, None, None] * mass, mass, square]), center=center
    )
