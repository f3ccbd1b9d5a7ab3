"""Exact error of softmax attention on n Gaussian tokens: two functions of n and of the score's
standard deviation s.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from esscher.convergence.integral.gaussian_rule import COLUMNS, integrate_pairs
from esscher.inputs import as_counts, as_tensor

__all__ = ["S_MAX", "GaussianError", "gaussian_error", "gaussian_error_slopes"]

Floats = npt.NDArray[np.float64]

S_MAX = 100.0  # largest score standard deviation taken


@dataclass(frozen=True)
class GaussianError:
    """f1 and f2 of ``gaussian_error`` and their slopes in s and in log n, n read as a real number;
    all of one shape.
    """

    f1: Floats
    f2: Floats
    df1_ds: Floats
    df2_ds: Floats
    df1_dlogn: Floats
    df2_dlogn: Floats


@overload
def gaussian_error(n: Any, s: Tensor) -> tuple[Tensor, Tensor]: ...
@overload
def gaussian_error(n: Tensor, s: npt.ArrayLike) -> tuple[Tensor, Tensor]: ...
@overload
def gaussian_error(n: float, s: float) -> tuple[np.float64, np.float64]: ...
@overload
def gaussian_error(n: npt.ArrayLike, s: npt.ArrayLike) -> tuple[Floats, Floats]: ...
def gaussian_error(
    n: Any, s: Any
) -> tuple[Tensor, Tensor] | tuple[Floats, Floats] | tuple[np.float64, np.float64]:
    """Mean squared error of attention on n Gaussian tokens, along the tilt (f1) and across it (f2).

        f1(n, s) = E (sum_j p_j (g_j - s))^2,
        f2(n, s) = E sum_j p_j^2,
        p_j proportional to exp(s g_j),

    g_1, ..., g_n independent standard normal. For tokens N(m, Sigma), tilt theta, s = sqrt(theta^T
    Sigma theta) and u = Sigma^(1/2) theta / s, the error Gamma_n - Gamma of the head has second
    moment V Sigma^(1/2) [f1 u u^T + f2 (I - u u^T)] Sigma^(1/2) V^T and mean -f2 V Sigma theta, in
    every dimension.

    ``n``: numbers of tokens, whole, from 1 to 2^53; ``s``: standard deviations of the score, from 0
    to ``S_MAX``; they broadcast. Float64, relative error below 1e-12. Torch tensors where either
    input is one, differentiable once in s; numpy otherwise.
    """
    if isinstance(n, Tensor) and n.requires_grad:
        raise ValueError(
            "n: expected counts, got a tensor that requires grad; gaussian_error_slopes has"
            " d/dlog n"
        )
    counts, deviations = _broadcast(n, s)
    if isinstance(s, Tensor) or isinstance(n, Tensor):
        device = s.device if isinstance(s, Tensor) else n.device
        f1, f2 = _Differentiable.apply(deviations.to(device), counts)  # type: ignore[no-untyped-call]
        return f1, f2
    value = _evaluate(counts, deviations.numpy())
    return value.f1[()], value.f2[()]


def gaussian_error_slopes(n: Any, s: Any) -> GaussianError:
    """``gaussian_error`` with its slopes in s and in log n, all from the same quadrature, as numpy
    arrays.

    The slopes are right to about 1e-11 of f1 and f2 themselves.
    """
    counts, deviations = _broadcast(n, s)
    return _evaluate(counts, deviations.detach().cpu().numpy())


class _Differentiable(torch.autograd.Function):
    """(f1, f2) as torch's graph sees them: the slopes in s are computed on the way forward."""

    @staticmethod
    def forward(ctx: FunctionCtx, s: Tensor, n: Floats) -> tuple[Tensor, Tensor]:
        value = _evaluate(n, s.detach().cpu().numpy())
        ctx.save_for_backward(
            *(torch.from_numpy(slope).to(s.device) for slope in (value.df1_ds, value.df2_ds))
        )
        return torch.from_numpy(value.f1).to(s.device), torch.from_numpy(value.f2).to(s.device)

    @staticmethod
    def backward(ctx: Any, grad_f1: Tensor, grad_f2: Tensor) -> tuple[Tensor, None]:
        # once_differentiable would drop the second derivative without a word
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gaussian_error is differentiable once; create_graph=True asks for second"
                " derivatives"
            )
        df1_ds, df2_ds = ctx.saved_tensors
        return grad_f1 * df1_ds + grad_f2 * df2_ds, None


def _broadcast(n: Any, s: Any) -> tuple[Floats, Tensor]:
    """Valid counts and standard deviations in float64, expanded to their common shape."""
    raw = np.asarray(n.tolist() if isinstance(n, Tensor) else n)  # bfloat16 has no array
    counts = as_counts(raw.ravel(), "n").astype(np.float64).reshape(raw.shape)
    deviations = as_tensor(s, "s").double()
    bad = (deviations < 0) | (deviations > S_MAX)
    if bool(bad.any()):
        raise ValueError(
            f"s: expected standard deviations of the score from 0 to {S_MAX:g}, got"
            f" {deviations[bad][0].item():g}; clamp s or raise the temperature"
        )
    try:
        shape = np.broadcast_shapes(counts.shape, tuple(deviations.shape))
    except ValueError as cause:
        shapes = f"{counts.shape} and {tuple(deviations.shape)}"
        raise ValueError(
            f"n and s: expected shapes that broadcast, got {shapes}; add an axis, n[:, None]"
        ) from cause
    return np.broadcast_to(counts, shape), deviations.expand(shape)


def _evaluate(n: Floats, s: Floats) -> GaussianError:
    """Integrate every pair, in threads where there are many; pairs of equal s sit together and
    share their work.
    """
    order = np.argsort(s, axis=None, kind="stable")[::-1]
    flat_n, flat_s = n.ravel()[order], s.ravel()[order]
    result = np.empty((order.size, COLUMNS))
    workers = torch.get_num_threads()
    parts = 8 * workers if order.size >= 32 * workers and workers > 1 else 1
    slices = [
        slice(part[0], part[-1] + 1)
        for part in np.array_split(np.arange(order.size), parts)
        if part.size
    ]
    if len(slices) <= 1:
        for part in slices:
            integrate_pairs(flat_n[part], flat_s[part], result[part])
    else:
        with ThreadPoolExecutor(workers) as pool:
            list(
                pool.map(
                    lambda part: integrate_pairs(flat_n[part], flat_s[part], result[part]), slices
                )
            )
    columns = np.empty((COLUMNS, order.size))
    columns[:, order] = result.T
    # rounding must not leave the range of sum_j p_j^2
    columns[1] = np.clip(columns[1], 1 / n.ravel(), 1.0)
    return GaussianError(*(column.reshape(s.shape) for column in columns))
