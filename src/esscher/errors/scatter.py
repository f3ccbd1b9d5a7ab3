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


@lru_cache(maxsize=8)
def _compiled_deposit(points: int) -> Any:
    """The loop over keys for so many taps: numbers that the compiler knows are loops it unrolls."""
    table = np.ascontiguousarray(weight_table(points)[:, ::-1].T)  # highest power first

    @numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract"})
    def deposit(scores: Any, rows: Any, first: Any, inverse: float, cells: Any) -> None:
        length, width = cells.shape[2], rows.shape[1]
        weights = np.empty(points)
        for i in range(len(scores)):
            grid = np.zeros((length, width))  # the channels of a cell side by side
            for j in range(len(rows)):
                x = np.float64(scores[i, j]) * inverse
                if x == -np.inf:
                    continue
                cell = np.floor(x)
                low = np.int64(cell) - (points - 1) - first[i]
                for tap in range(points):
                    weight = table[0, tap]
                    for power in range(1, points):
                        weight = weight * (x - cell) + table[power, tap]
                    weights[tap] = weight
                for tap in range(points):
                    weight = weights[tap]
                    for channel in range(width):
                        grid[low + tap, channel] += weight * rows[j, channel]
            for channel in range(width):
                for k in range(length):
                    cells[channel, i, k] += grid[k, channel]

    return deposit
