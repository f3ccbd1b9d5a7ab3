"""Products whose factors may be as large or as small as float64 allows: powers of two are taken out and put back last.

x = 2^e y with the largest |y| of each row in [1/2, 1), so that nothing overflows or vanishes unless the result does.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float64
from torch import Tensor

__all__ = ["shift", "split", "wide_scores"]


def split(x: Tensor, dim: int | tuple[int, ...] = -1) -> tuple[Tensor, Tensor]:
    """(y, e) with x = 2^e y; e is shared along ``dim``, which is kept with length one."""
    largest = x.detach().double().abs().amax(dim, keepdim=True)
    exponent = torch.frexp(largest).exponent.double()
    return shift(x.double(), -exponent), exponent


def shift(x: Tensor, exponent: Tensor) -> Tensor:
    """2^exponent x, in two halves because 2^1074 is not a float64 while 2^1074 * 2^-1074 is."""
    half = (0.5 * exponent).floor()
    return x * torch.exp2(half) * torch.exp2(exponent - half)


def wide_scores(q: Tensor, k: Tensor, scale: float) -> Float64[Tensor, "*batch m n"]:
    """scale <q_i, k_j> in float64: infinite only where the score itself is out of range."""
    (q, of_query), (k, of_key) = split(q), split(k)
    mantissa, of_scale = math.frexp(scale)
    return shift(mantissa * (q @ k.mT), of_query + of_key.mT + float(of_scale))
