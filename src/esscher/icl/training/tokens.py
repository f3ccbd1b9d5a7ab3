"""The tokens of a random prompt, drawn without drawing the tokens; ``prompts`` tells why this is
enough.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from esscher.icl.training.normals import compiled
from esscher.icl.training.stream import chi_square, take
from esscher.icl.training.token_sums import add_chunk, largest, no_tokens, sum_chunk

__all__ = ["SHORT", "Work", "apply_factors", "apply_symmetric", "draw_tokens", "new_work"]

Floats = npt.NDArray[np.float64]
SHORT = 32  # below this length drawing every coordinate is faster
CHUNK = 512  # tokens summed in float32 before the sums go on in float64
# squared share of a weight vector outside the span of the others, below which it counts as inside
COLLINEAR = 1e-6


class Work(NamedTuple):
    """Arrays of one prompt of ``length`` tokens with ``rest`` coordinates beyond the first two, Q
    (length x rest).
    """

    length: int
    # Q is drawn itself: too few tokens for the shortcut to pay, or for Bartlett's factor to exist
    short: bool
    linear: Floats  # W^T Q, 4 x rest
    normal: Floats  # N, 4 x rest; unused in a short prompt
    square: Floats  # Q^T Q in a short prompt, otherwise Bartlett's factor; lower triangle
    gram: Floats  # factor of W^T W, 4 x 4
    weight: npt.NDArray[np.float32]  # e of the tokens of a chunk


@compiled
def new_work(length: int, rest: int) -> Any:
    short = length < max(SHORT, rest + 4)
    return Work(
        length,
        short,
        np.zeros((4, rest)),
        np.zeros((4, rest)),
        np.zeros((rest, rest)),
        np.zeros((4, 4)),
        np.zeros(length if short else CHUNK, np.float32),
    )


@compiled
def long_prompt(stream: Any, reading: Any, work: Any) -> Any:
    """Token sums, and C N, N and Bartlett's factor instead of Q."""
    sums, shift = no_tokens(), -np.inf
    length, weight = work.length, work.weight
    chunks = -(-length // CHUNK)
    for chunk in range(chunks):
        size = (length + chunk) // chunks
        pair = take(stream, 2 * size)
        one, two = pair[:size], pair[size:]
        peak = largest(one, np.float32(reading.score))
        factor = 1.0
        if not peak <= shift:
            factor = math.exp(shift - peak) if chunk > 0 else 1.0
            shift = float(peak)
        sums = add_chunk(sums, factor, sum_chunk(one, two, reading, shift, weight[:size]))
    linear, normal, triangle, gram = work.linear, work.normal, work.square, work.gram
    rank, rest = factor_gram(sums, reading, gram), linear.shape[1]
    drawn = take(stream, rank * rest)
    normal[:] = 0.0
    for i in range(rank):
        for k in range(rest):
            normal[i, k] = drawn[i * rest + k]
    for j in range(4):
        for k in range(rest):
            total = 0.0
            for i in range(rank):
                total += gram[j, i] * normal[i, k]
            linear[j, k] = total
    for i in range(rest):
        triangle[i, i] = math.sqrt(chi_square(stream, length - rank - i))
        below = take(stream, i)
        for k in range(i):
            triangle[i, k] = below[k]
    return sums


@compiled
def factor_gram(sums: Any, reading: Any, gram: Any) -> int:
    """Cholesky factor (4 x rank) of W^T W, W = (g_1, g_2, e, e a); columns of dependent vectors are
    left out.
    """
    full = np.empty((4, 4))
    full[0, 0], full[1, 0], full[1, 1] = sums.g11, sums.g12, sums.g22
    full[2, 0], full[2, 1], full[2, 2] = sums.e_g1, sums.e_g2, sums.ee
    full[3, 0] = reading.along * sums.e_g11 + reading.across * sums.e_g12
    full[3, 1] = reading.along * sums.e_g12 + reading.across * sums.e_g22
    full[3, 2], full[3, 3] = sums.ee_a, sums.ee_aa
    gram[:] = 0.0
    rank = 0
    for j in range(4):
        left = full[j, j]
        for i in range(rank):
            left -= gram[j, i] ** 2
        if not left > COLLINEAR * full[j, j]:
            continue
        root = math.sqrt(left)
        gram[j, rank] = root
        for k in range(j + 1, 4):
            value = full[k, j]
            for i in range(rank):
                value -= gram[k, i] * gram[j, i]
            gram[k, rank] = value / root
        rank += 1
    return rank


@compiled
def short_prompt(stream: Any, reading: Any, work: Any) -> Any:
    """Token sums and W^T Q, Q^T Q from all coordinates of all tokens."""
    length, linear, square, weight = work.length, work.linear, work.square, work.weight
    rest = linear.shape[1]
    pair = take(stream, 2 * length)
    one, two = pair[:length], pair[length:]
    peak = largest(one, np.float32(reading.score))
    sums = add_chunk(no_tokens(), 1.0, sum_chunk(one, two, reading, peak, weight))
    if rest == 0:
        return sums
    linear[:] = 0.0
    square[:] = 0.0
    first, second = one.copy(), two.copy()  # the buffer may be filled anew below
    for j in range(length):
        row = take(stream, rest)
        x, y, e = float(first[j]), float(second[j]), float(weight[j])
        ea = e * (reading.along * x + reading.across * y)
        for k in range(rest):
            q = float(row[k])
            linear[0, k] += x * q
            linear[1, k] += y * q
            linear[2, k] += e * q
            linear[3, k] += ea * q
            for i in range(k + 1):
                square[k, i] += q * float(row[i])
    return sums


@compiled
def draw_tokens(stream: Any, reading: Any, work: Any) -> Any:
    """A prompt's tokens: their sums, and in ``work`` all that outputs and gradients take from Q."""
    return short_prompt(stream, reading, work) if work.short else long_prompt(stream, reading, work)


@compiled
def apply_symmetric(lower: Any, x: Any, out: Any) -> None:
    """out = Q^T Q x from the lower triangle of Q^T Q."""
    out[:] = 0.0
    for k in range(x.size):
        for i in range(k):
            out[k] += lower[k, i] * x[i]
            out[i] += lower[k, i] * x[k]
        out[k] += lower[k, k] * x[k]


@compiled
def apply_factors(normal: Any, triangle: Any, x: Any, out: Any) -> None:
    """out = Q^T Q x = N^T N x + T T^T x."""
    out[:] = 0.0
    rest = x.size
    for i in range(4):
        product = 0.0
        for k in range(rest):
            product += normal[i, k] * x[k]
        for k in range(rest):
            out[k] += product * normal[i, k]
    for i in range(rest):  # column by column of the triangle
        product = 0.0
        for k in range(i, rest):
            product += triangle[k, i] * x[k]
        for k in range(i, rest):
            out[k] += product * triangle[k, i]
