"""Sums over tokens of which the first two coordinates are known: all that outputs take from these
two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from esscher.icl.training.normals import compiled, exp_of_negative

__all__ = ["Reading", "TokenSums", "add_chunk", "largest", "no_tokens", "sum_chunk"]


class Reading(NamedTuple):
    """What a token is to softmax attention: its score is ``score g_1``, its value a = ``along g_1 +
    across g_2``.
    """

    score: float
    along: float
    across: float


class TokenSums(NamedTuple):
    """Sums over tokens, e = exp(score - shift) with one shift for all: ``e`` of e, ``e_g1`` of e
    g_1, ``ee_a`` of e^2 a, ...
    """

    e: float
    e_g1: float
    e_g2: float
    e_g11: float
    e_g12: float
    e_g22: float
    ee: float
    ee_a: float
    ee_aa: float
    g11: float
    g12: float
    g22: float


@compiled
def no_tokens() -> Any:
    """The sums over no tokens."""
    return TokenSums(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


# the tokens' own normals are never NaN, and a maximum is only vectorised where that is known
@numba.njit(cache=True, nogil=True, fastmath=True)
def largest(x: Any, factor: Any) -> Any:
    """max_i factor x_i."""
    found = factor * x[0]
    for i in range(x.size):
        found = max(found, factor * x[i])
    return found


@compiled
def sum_chunk(one: Any, two: Any, reading: Any, shift: float, weight: Any) -> Any:
    """Sums over tokens with first coordinates ``one`` and second ``two``, in float32; fills
    ``weight`` with e.
    """
    score, along, across = (
        np.float32(reading.score),
        np.float32(reading.along),
        np.float32(reading.across),
    )
    top = np.float32(shift)
    zero: Any = np.float32(0.0)
    e_, e_g1, e_g2, e_g11, e_g12, e_g22 = zero, zero, zero, zero, zero, zero
    ee, ee_a, ee_aa, g11, g12, g22 = zero, zero, zero, zero, zero, zero
    for i in range(one.size):
        x, y = one[i], two[i]
        e = exp_of_negative(score * x - top)
        weight[i] = e
        ex, ey, ea = e * x, e * y, e * (along * x + across * y)
        e_ += e
        e_g1 += ex
        e_g2 += ey
        e_g11 += ex * x
        e_g12 += ex * y
        e_g22 += ey * y
        ee += e * e
        ee_a += e * ea
        ee_aa += ea * ea
        g11 += x * x
        g12 += x * y
        g22 += y * y
    return TokenSums(e_, e_g1, e_g2, e_g11, e_g12, e_g22, ee, ee_a, ee_aa, g11, g12, g22)


@compiled
def add_chunk(sums: Any, factor: float, part: Any) -> Any:
    """``sums`` plus those of a chunk, in float64; ``factor`` is what e shrank by as its shift rose,
    1 where it did not.
    """
    square = factor * factor
    return TokenSums(
        factor * sums.e + part.e,
        factor * sums.e_g1 + part.e_g1,
        factor * sums.e_g2 + part.e_g2,
        factor * sums.e_g11 + part.e_g11,
        factor * sums.e_g12 + part.e_g12,
        factor * sums.e_g22 + part.e_g22,
        square * sums.ee + part.ee,
        square * sums.ee_a + part.ee_a,
        square * sums.ee_aa + part.ee_aa,
        sums.g11 + part.g11,
        sums.g12 + part.g12,
        sums.g22 + part.g22,
    )
