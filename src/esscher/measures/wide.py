"""Products and norms of numbers as large or as small as float64 allows: powers of two are taken out and put back last.

x = 2^e y with the largest |y| of each row in [1/2, 1), so that nothing overflows or vanishes unless the result does.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float64
from torch import Tensor

__all__ = ["norms", "shift", "split", "units", "wide_scores"]


def split(x: Tensor, dim: int | tuple[int, ...] = -1) -> tuple[Tensor, Tensor]:
    """(y, e), both float64, with x = 2^e y; e is shared along ``dim``, which is kept with length one."""
    largest = x.detach().double().abs().amax(dim, keepdim=True)
    exponent = torch.frexp(largest).exponent.double()
    return shift(x.double(), -exponent), exponent


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
    return torch.nn.functional.normalize(split(rows)[0], dim=-1)
