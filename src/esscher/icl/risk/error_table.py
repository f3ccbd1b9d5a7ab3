"""f1 and f2 of ``gaussian_error`` at one n, tabulated: what a gradient flow needs thousands of
times.
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

from esscher.convergence.integral.gaussian import S_MAX, gaussian_error_slopes
from esscher.inputs import as_count

__all__ = ["ErrorTable", "table"]

Floats = npt.NDArray[np.float64]

WIDTH = 0.5  # of a panel in s
# of the polynomial in a panel: relative error below 1e-9 for n >= 2 and 1e-11 for n >= 10
DEGREE = 12

# Row k: the Chebyshev polynomial of degree k in powers of x.
TO_POWERS = np.array(
    [np.pad(chebyshev.cheb2poly(np.eye(DEGREE + 1)[k]), (0, DEGREE - k)) for k in range(DEGREE + 1)]
)


class ErrorTable:
    """log f1(n, s) and log f2(n, s) as polynomials on panels of s, each made when a first s falls
    into it.

    Not for n = 1, where f1 = 1 + s^2 and f2 = 1 are used as they are.
    """

    def __init__(self, n: Any) -> None:
        self.n = as_count(n, "n")
        self._coefficients = np.empty((0, 2, DEGREE + 1))

    def evaluate(self, s: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        """f1, f2 and their slopes in s, in the shape of ``s``."""
        if self.n == 1:
            return 1.0 + s * s, np.ones_like(s), 2.0 * s, np.zeros_like(s)
        self._extend(float(s.max(initial=0.0)))
        out = np.empty((4, s.size))
        _horner(self._coefficients, np.ascontiguousarray(s).ravel(), out)
        f1, f2, df1, df2 = (row.reshape(s.shape) for row in out)
        return f1, f2, df1, df2

    def __call__(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """(f1, f2) as tensors, differentiable once in s."""
        f1, f2 = _Tabulated.apply(s, self)  # type: ignore[no-untyped-call]
        return f1, f2

    def _extend(self, largest: float) -> None:
        if not largest <= S_MAX:
            raise ValueError(
                f"scores: expected standard deviations up to {S_MAX:g}, got {largest:g}; the score"
                " matrix U is too large for this law of tokens"
            )
        have = self._coefficients.shape[0]
        need = min(int(largest / WIDTH) + 1, round(S_MAX / WIDTH))
        if need <= have:
            return
        points = chebyshev.chebpts1(DEGREE + 1)
        s = WIDTH * (np.arange(have, need)[:, None] + 0.5 * (points + 1.0))
        value = gaussian_error_slopes(self.n, s)
        fits = [
            chebyshev.chebfit(points, np.log(values).T, DEGREE) for values in (value.f1, value.f2)
        ]
        powers = np.stack([fit.T @ TO_POWERS for fit in fits], axis=1)
        self._coefficients = np.concatenate([self._coefficients, powers])


@lru_cache(maxsize=64)
def table(length: int) -> ErrorTable:
    """One table of f1, f2 for each prompt length."""
    return ErrorTable(length)


class _Tabulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, s: Tensor, table: ErrorTable) -> tuple[Tensor, Tensor]:
        f1, f2, df1, df2 = (torch.from_numpy(array) for array in table.evaluate(s.detach().numpy()))
        ctx.save_for_backward(df1, df2)
        return f1, f2

    @staticmethod
    def backward(ctx: Any, grad_f1: Tensor, grad_f2: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the softmax risk is differentiable once; create_graph=True asks for second"
                " derivatives"
            )
        df1, df2 = ctx.saved_tensors
        return grad_f1 * df1 + grad_f2 * df2, None


@numba.njit(nogil=True, cache=True)
def _horner(coefficients: Floats, s: Floats, out: Floats) -> None:
    """Both polynomials and their slopes at every s; the last panel is closed on the right."""
    for point in range(s.size):
        panel = min(int(s[point] / WIDTH), coefficients.shape[0] - 1)
        x = 2.0 * (s[point] / WIDTH - panel) - 1.0
        for which in range(2):
            value, slope = coefficients[panel, which, DEGREE], 0.0
            for power in range(DEGREE - 1, -1, -1):
                slope = slope * x + value
                value = value * x + coefficients[panel, which, power]
            f = np.exp(value)
            out[which, point] = f
            out[2 + which, point] = f * slope * 2.0 / WIDTH
