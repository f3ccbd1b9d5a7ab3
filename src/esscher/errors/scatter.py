"""B-splines on score grids: deposits of keys, and the coefficients of kernels that read them.

For every query and key, ``points`` neighbouring cells of that query receive the key's row of
channels times its B-spline weights: by a compiled loop on the CPU, by tensor operations on any
other device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from math import comb, factorial, pi
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt
import torch
from scipy.interpolate import BSpline, PPoly
from scipy.linalg import solveh_banded
from torch import Tensor
from torch.nn.functional import pad

Floats = npt.NDArray[np.float64]
_T = TypeVar("_T")


@lru_cache(maxsize=8)
def weight_table(points: int) -> Floats:
    """Polynomial coefficients of the taps: tap t of a key at the fraction r of its cell weighs
    sum_k table[t, k] r^k.

    That is beta(r + points - 1 - t): the pieces of beta from the last to the first.
    """
    beta = BSpline.basis_element(np.arange(points + 1.0))
    pieces = PPoly.from_spline(beta)
    first = int(np.flatnonzero(pieces.x == 0)[-1])  # scipy adds knots on either side
    return np.ascontiguousarray(pieces.c[::-1, first : first + points][:, ::-1].T)


def spline_coefficients(
    samples: Callable[[Tensor], dict[str, tuple[str, Tensor]]],
    centres: Tensor,
    points: int,
    spacing: float,
) -> dict[str, tuple[str, Tensor]]:
    """Coefficients (cells, nodes) c_k of functions sum_k c_k beta(x - k) with given samples (nodes,
    cells) at the centres, evenly spaced.

    They solve sum_i beta(points/2 + i) c_(k + i) = sample_k. The grid is continued on either side
    until what lies beyond, which falls as the largest pole of 1 / sum_i beta(1 + i) z^i inside the
    unit circle, is below 1e-17 of samples that grow as exp(2u), as kernels do to the left of 0.
    """
    assert points % 2 == 0, "an even number of taps puts the centre of a spline on the grid"
    taps = weight_table(points)[: points - 1, 0]  # beta at 1 .. points - 1, symmetric
    poles = np.abs(np.roots(taps))
    decay = np.log(poles[poles < 1].max()) + 2 * spacing
    assert decay < 0, "so coarse a grid has no coefficients for exp(2u)"
    reach = int(np.ceil(np.log(1e-17) / decay))
    index = torch.arange(-reach, len(centres) + reach, dtype=torch.float64, device=centres.device)
    bands = np.repeat(taps[points // 2 - 1 :, None], len(index), axis=1)
    found = {}
    for name, (channel, values) in samples(centres[0] + index * spacing).items():
        solved = solveh_banded(bands, values.T.cpu().numpy(), lower=True, check_finite=False)
        found[name] = channel, torch.from_numpy(solved[reach:-reach]).to(centres.device)
    return found


def exponential_gain(points: int, rate: float) -> float:
    """sum_m beta(points / 2 + m) exp(rate m): the coefficient of exp(rate x) is its sample over
    this, exactly.
    """
    samples = weight_table(points)[:, 0]
    shifts = np.arange(points) - (points // 2 - 1)
    return float(samples @ np.exp(rate * shifts))


def interpolation_error(points: int, spacing: float, strip: float) -> float:
    """2 (spacing / 2 pi)^points points! / strip^points: the error for a kernel analytic within |Im
    u| < strip.
    """
    return float(2 * (spacing / (2 * pi * strip)) ** points * factorial(points))


def coarsen(cells: Tensor, points: int) -> Tensor:
    """Deposits at twice the spacing, D'_K = 2^(1 - points) sum_k C(points, k) D_(2K + k).

    Exact: a B-spline at twice the spacing is this binomial sum of B-splines at the spacing. The
    last axis of ``cells`` ends on an even edge.
    """
    fine = cells.shape[-1]
    coarse = (fine + points + 1) // 2
    # cells of even and of odd number side by side, so that every term of the sum is a run of
    # neighbours
    padded = pad(cells, (2 * coarse - fine, points))
    even, odd = padded[..., ::2].contiguous(), padded[..., 1::2].contiguous()
    total = torch.zeros_like(even[..., :coarse])
    for k in range(points + 1):
        total.add_(
            (odd if k % 2 else even)[..., k // 2 : k // 2 + coarse],
            alpha=comb(points, k) * 2.0 ** (1 - points),
        )
    return total


# ---- Deposits.

OPEN = 2**16  # cells x channels that one task keeps open
# sums in any order; infinity and NaN stay what they are
FAST = {"reassoc", "contract", "arcp", "nsz"}


def scatter(
    scores: Tensor, rows: Tensor, first: Tensor, cells: Tensor, spacing: float, points: int
) -> None:
    """Add to ``cells`` (channels, m, L), in place, the keys with ``scores`` (m, B) and ``rows`` (B,
    channels).

    cells[:, i, k - first_i] += rows[j] beta(scores_ij / spacing - k) for every k; the caller has
    made room. A score of -inf is a key that the query does not see.
    """
    work = scatter_compiled if cells.device.type == "cpu" else scatter_tensors
    work(scores, rows, first, cells, spacing, points)


def scatter_tensors(
    scores: Tensor, rows: Tensor, first: Tensor, cells: Tensor, spacing: float, points: int
) -> None:
    """``scatter`` in tensor operations, a few queries at a time so that the temporary stays below
    2^24 numbers.
    """
    table = torch.as_tensor(weight_table(points), dtype=torch.float64, device=scores.device)
    length = cells.shape[2]
    group = max(1, 2**24 // rows.numel())
    for i in range(0, scores.shape[0], group):
        x = scores[i : i + group].double() / spacing
        seen = x > -torch.inf
        x = torch.where(seen, x, (first[i : i + group, None] + points - 1).double())
        cell = x.floor()
        powers = (x - cell)[:, :, None] ** torch.arange(points, device=x.device)
        low = cell.long() - (points - 1) - first[i : i + group, None]
        low += length * torch.arange(low.shape[0], device=low.device)[:, None]
        total = cells.new_zeros(low.shape[0] * length, rows.shape[1])
        for tap in range(points):
            weight = (powers @ table[tap]) * seen
            total.index_add_(0, (low + tap).flatten(), (weight[:, :, None] * rows).flatten(0, 1))
        cells[:, i : i + group] += total.T.reshape(-1, low.shape[0], length)


def scatter_compiled(
    scores: Tensor, rows: Tensor, first: Tensor, cells: Tensor, spacing: float, points: int
) -> None:
    """``scatter`` by a compiled loop, queries shared among torch's number of threads."""
    lines, base, out = scores.contiguous().numpy(), first.contiguous().numpy(), cells.numpy()
    values, deposit = rows.double().contiguous().numpy(), _compiled_deposit(points)
    queries = max(1, min(16, OPEN // (cells.shape[2] * rows.shape[1])))

    def task(i: int) -> None:
        part = slice(i, i + queries)
        deposit(lines[part], values, base[part], 1 / spacing, out[:, part])

    in_threads(task, range(0, len(lines), queries))


def in_threads(task: Callable[[int], _T], items: Sequence[int]) -> list[_T]:
    """What a task returns for each item: items are taken one by one by torch's number of threads,
    so that none waits for a slower one.
    """
    threads = min(torch.get_num_threads(), len(items))
    return list((map if threads < 2 else _pool(threads, os.getpid()).map)(task, items))


@lru_cache(maxsize=2)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Of this process: a fork has none of its parent's threads."""
    return ThreadPoolExecutor(threads)


TILE = 2048  # keys at once, whose rows stay in the processor's cache
TOGETHER = 4  # cells and keys that are added at once


@lru_cache(maxsize=8)
def _compiled_deposit(points: int) -> Any:
    """The loop over keys for so many taps: numbers that the compiler knows are loops it unrolls.

    Keys of one cell are added together, so that the cell is read and written once for four keys.
    """
    table = np.ascontiguousarray(weight_table(points)[:, ::-1])  # highest power first
    assert points % TOGETHER == 0

    @numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract"})
    def deposit(scores: Any, rows: Any, first: Any, inverse: float, cells: Any) -> None:
        length, width = cells.shape[2], rows.shape[1]
        grid = np.zeros((len(scores), length, width))  # the channels of a cell side by side
        cell, order = np.empty(TILE, dtype=np.int32), np.empty(TILE, dtype=np.int64)
        apart, inside, weights = np.empty(TILE), np.empty(TILE), np.empty((points, TILE))
        ends = np.empty(length + 2, dtype=np.int64)
        for begin in range(0, len(rows), TILE):
            tile = rows[begin : begin + TILE]
            for i in range(len(scores)):
                low, mine = np.float64(first[i] + points - 1), grid[i]
                for j in range(len(tile)):
                    x = max(np.float64(scores[i, begin + j]) * inverse - low, -1.0)
                    floor = np.floor(x)
                    apart[j], cell[j] = x - floor, np.int32(floor) + 1  # 0: it is not seen
                ends[:] = 0
                for j in range(len(tile)):
                    ends[cell[j] + 1] += 1
                for k in range(length + 1):
                    ends[k + 1] += ends[k]
                for j in range(len(tile)):  # a key's place, and afterwards the end of each cell
                    at = ends[cell[j]]
                    order[at], inside[at], ends[cell[j]] = j, apart[j], at + 1
                for tap in range(points):
                    for at in range(len(tile)):
                        weight = table[tap, 0]
                        for power in range(1, points):
                            weight = weight * inside[at] + table[tap, power]
                        weights[tap, at] = weight
                for k in range(length):
                    start, end = ends[k], ends[k + 1]
                    for tap in range(0, points if start < end else 0, TOGETHER):
                        some = weights[tap : tap + TOGETHER, start:end]
                        mix(some, order[start:end], tile, mine[k + tap : k + tap + TOGETHER])
        for i in range(len(scores)):
            for channel in range(width):
                for k in range(length):
                    cells[channel, i, k] += grid[i, k, channel]

    return deposit


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)
def mix(weights: Any, index: Any, values: Any, out: Any) -> None:
    """out += weights @ values[index], four rows of ``out`` and four values at once."""
    one, two, three, four = out[0], out[1], out[2], out[3]
    whole = index.size // TOGETHER * TOGETHER
    for f in range(0, whole, TOGETHER):
        # numbers of their own: the compiler need not read them again after each sum
        a, b = _column(weights, f), _column(weights, f + 1)
        d, e = _column(weights, f + 2), _column(weights, f + 3)
        u, v = values[index[f]], values[index[f + 1]]
        w, x = values[index[f + 2]], values[index[f + 3]]
        for c in range(one.size):
            p, q, r, s = u[c], v[c], w[c], x[c]
            one[c] += a[0] * p + b[0] * q + d[0] * r + e[0] * s
            two[c] += a[1] * p + b[1] * q + d[1] * r + e[1] * s
            three[c] += a[2] * p + b[2] * q + d[2] * r + e[2] * s
            four[c] += a[3] * p + b[3] * q + d[3] * r + e[3] * s
    for f in range(whole, index.size):
        a, u = _column(weights, f), values[index[f]]
        for c in range(one.size):
            one[c] += a[0] * u[c]
            two[c] += a[1] * u[c]
            three[c] += a[2] * u[c]
            four[c] += a[3] * u[c]


@numba.njit(inline="always")
def _column(weights: Any, f: int) -> tuple[float, float, float, float]:
    return weights[0, f], weights[1, f], weights[2, f], weights[3, f]
