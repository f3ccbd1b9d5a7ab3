"""f1, f2, q1, q2 and c of ``gaussian_sure`` at one n, tabulated over the deviation s of scores and
the known key's score b.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from numpy.polynomial import chebyshev
from torch import Tensor
from torch.autograd.function import FunctionCtx

from esscher.convergence.integral.gaussian import S_MAX
from esscher.convergence.integral.gaussian_sure import COLUMNS_SURE, integrate_sure, share_range
from esscher.icl.risk.error_table import DEGREE, WIDTH

__all__ = ["SureTable", "sure_table"]

Floats = npt.NDArray[np.float64]

# of a panel in b and of its polynomial: relative error about 1e-9 of the panel's largest value
WIDTH_B, DEGREE_B = 2.0, 16
POINTS, POINTS_B = chebyshev.chebpts1(DEGREE + 1), chebyshev.chebpts1(DEGREE_B + 1)
TO_S, TO_B = (
    np.linalg.inv(chebyshev.chebvander(points, points.size - 1)) for points in (POINTS, POINTS_B)
)


class SureTable:
    """The five functions as polynomials on panels of (s, b), each made when a first point falls
    into it.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._place: dict[tuple[int, int], int] = {}
        self._coefficients = np.empty((0, COLUMNS_SURE, DEGREE + 1, DEGREE_B + 1))

    def evaluate(self, s: Floats, b: Floats) -> Floats:
        """Rows: the functions, their slopes in s, their slopes in b; then the shape of ``s`` and
        ``b``.
        """
        largest = float(s.max(initial=0.0))
        if not largest <= S_MAX:
            raise ValueError(
                f"scores: expected standard deviations up to {S_MAX:g}, got {largest:g}; the score"
                " matrix U is too large for this law of tokens"
            )
        flat_s, flat_b = np.ascontiguousarray(s).ravel(), np.array(b, np.float64).ravel()
        moves = _clamp(float(self.n), flat_s, flat_b)
        panels = np.stack(
            [
                np.minimum(flat_s / WIDTH, S_MAX / WIDTH - 1).astype(int),
                np.floor(flat_b / WIDTH_B).astype(int),
            ]
        )
        distinct, index = np.unique(panels, axis=1, return_inverse=True)
        self._extend([(int(i), int(j)) for i, j in distinct.T])
        place = np.array([self._place[int(i), int(j)] for i, j in distinct.T])[index.ravel()]
        out = np.empty((3 * COLUMNS_SURE, flat_s.size))
        x = 2.0 * (flat_s / WIDTH - panels[0]) - 1.0
        _evaluate(self._coefficients, place, x, 2.0 * (flat_b / WIDTH_B - panels[1]) - 1.0, out)
        out[2 * COLUMNS_SURE :] *= moves
        return out.reshape(3 * COLUMNS_SURE, *s.shape)

    def __call__(self, s: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        """f1, f2, q1, q2, c as tensors, differentiable once in s and b."""
        return tuple(_Tabulated.apply(s, b, self))  # type: ignore[no-untyped-call]

    def _extend(self, panels: list[tuple[int, int]]) -> None:
        """Fill the panels that are new; those of one range of s share the integrals over tokens."""
        new = [panel for panel in panels if panel not in self._place]
        made = [self._coefficients]
        for first in sorted({i for i, _ in new}):
            columns = [j for i, j in new if i == first]
            b = WIDTH_B * (np.array(columns)[:, None] + 0.5 * (POINTS_B + 1.0))
            found = np.empty((DEGREE + 1, b.size, COLUMNS_SURE))
            for row, s in enumerate(WIDTH * (first + 0.5 * (POINTS + 1.0))):
                integrate_sure(float(self.n), float(s), b.ravel(), found[row])
            values = found.reshape(DEGREE + 1, len(columns), DEGREE_B + 1, COLUMNS_SURE)
            made.append(np.einsum("ks,sjbf,mb->jfkm", TO_S, values, TO_B))
            for j in columns:
                self._place[first, j] = len(self._place)
        self._coefficients = np.concatenate(made)


@lru_cache(maxsize=16)
def sure_table(length: int) -> SureTable:
    """One table for each prompt length."""
    return SureTable(length)


class _Tabulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, s: Tensor, b: Tensor, table: SureTable) -> tuple[Tensor, ...]:
        values = torch.from_numpy(table.evaluate(s.detach().numpy(), b.detach().numpy()))
        ctx.save_for_backward(values[COLUMNS_SURE : 2 * COLUMNS_SURE], values[2 * COLUMNS_SURE :])
        return tuple(values[:COLUMNS_SURE].unbind())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the softmax risk is differentiable once; create_graph=True asks for second"
                " derivatives"
            )
        by_s, by_b = ctx.saved_tensors
        grad = torch.stack(grads)
        return (grad * by_s).sum(dim=0), (grad * by_b).sum(dim=0), None


@numba.njit(nogil=True, cache=True)
def _clamp(n: float, s: Floats, b: Floats) -> Floats:
    """Move each b into the range in which it matters; 0 where it was moved, 1 elsewhere."""
    moves = np.ones(b.size)
    for point in range(b.size):
        low, high = share_range(n, s[point])
        if not low <= b[point] <= high:
            b[point], moves[point] = min(max(b[point], low), high), 0.0
    return moves


@numba.njit(nogil=True, cache=True)
def _evaluate(coefficients: Floats, place: Any, x: Floats, y: Floats, out: Floats) -> None:
    """Chebyshev sums and their slopes; ``out`` has the functions, then d/ds, then d/db."""
    functions, rows, columns = coefficients.shape[1:]
    t, dt, u, du = np.empty(rows), np.empty(rows), np.empty(columns), np.empty(columns)
    for point in range(x.size):
        _polynomials(x[point], t, dt)
        _polynomials(y[point], u, du)
        for f in range(functions):
            value = by_s = by_b = 0.0
            for k in range(rows):
                inner = slope = 0.0
                for m in range(columns):
                    inner += coefficients[place[point], f, k, m] * u[m]
                    slope += coefficients[place[point], f, k, m] * du[m]
                value += t[k] * inner
                by_s += dt[k] * inner
                by_b += t[k] * slope
            out[f, point] = value
            out[functions + f, point] = by_s * 2.0 / WIDTH
            out[2 * functions + f, point] = by_b * 2.0 / WIDTH_B


@numba.njit(nogil=True, cache=True)
def _polynomials(x: float, t: Floats, dt: Floats) -> None:
    """T_k(x) and its slope for every degree."""
    t[0], dt[0], t[1], dt[1] = 1.0, 0.0, x, 1.0
    for k in range(2, t.size):
        t[k] = 2.0 * x * t[k - 1] - t[k - 2]
        dt[k] = 2.0 * t[k - 1] + 2.0 * x * dt[k - 1] - dt[k - 2]
