"""Products and norms of numbers as large or as small as float64 allows: powers of two are taken out
and put back last.

x = 2^e y with the largest |y| of each row in [1/2, 1), so that nothing overflows or vanishes unless
the result does. Rows of ordinary size are left as they are, e = 0: products of a few of them cannot
leave the range.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float64
from torch import Tensor

__all__ = ["norms", "shift", "split", "units", "wide_scores"]

ORDINARY = 100.0  # |e| up to which numbers are left alone


def split(
    x: Tensor, dim: int | tuple[int, ...] = -1, ordinary: float = ORDINARY
) -> tuple[Tensor, Tensor]:
    """(y, e), both float64, with x = 2^e y; e is shared along ``dim``, which is kept with length
    one.
    """
    largest = torch.linalg.vector_norm(x.detach(), torch.inf, dim=dim, keepdim=True).double()
    exponent = torch.frexp(largest).exponent.double()
    exponent = exponent.masked_fill(exponent.abs() <= ordinary, 0.0)
    return (shift(x.double(), -exponent) if bool(exponent.any()) else x.double()), exponent


def shift(x: Tensor, exponent: Tensor) -> Tensor:
    """2^exponent x, in two halves because 2^1074 is not a float64 while 2^1074 * 2^-1074 is."""
    half = (0.5 * exponent).floor()
    return x * torch.exp2(half) * torch.exp2(exponent - half)


def wide_scores(q: Tensor, k: Tensor, scale: float = 1.0) -> Float64[Tensor, "*batch m n"]:
    """scale <q_i, k_j> in float64: infinite only where the score itself is out of range."""
    (q, of_query), (k, of_key) = split(q), split(k)
    mantissa, of_scale = math.frexp(scale)
    return shift(mantissa * (q @ k.mT), of_query + of_key.mT + float(of_scale))


def norms(rows: Tensor) -> Float64[Tensor, "*batch"]:
    """Euclidean length of each row."""
    scaled, exponent = split(rows)
    return shift(torch.linalg.vector_norm(scaled, dim=-1), exponent[..., 0])


def units(rows: Tensor) -> Float64[Tensor, "*batch d"]:
    """Each row at length one; rows of zeros stay."""
    return torch.nn.functional.normalize(split(rows)[0], dim=-1, eps=1e-300)
