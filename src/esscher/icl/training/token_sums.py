"""Sums over the tokens of a random prompt, drawn without drawing the tokens (the why is told in ``sgd_kernel``).

Each prompt has a tuple of arrays to work with: sums (12), a chunk's sums (12), W^T Q (4 x rest), N (4 x rest), Q^T Q or
Bartlett's factor (rest x rest, lower triangle), the factor of W^T W (4 x 4), and the weights e of a chunk.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from esscher.icl.training.normals import LANES, compiled, exp_of_negative, fill_normals

__all__ = ["SHORT", "Stream", "apply_square", "chi_square", "draw_tokens", "is_short", "new_stream", "new_work", "take"]

SHORT = 32  # below this length drawing every coordinate is faster
CHUNK = 512  # tokens summed in float32 before the sums go on in float64
BUFFER = 32 * 2 * LANES
COLLINEAR = 1e-6  # squared share of a weight vector outside the span of the others, below which it counts as inside

Stream = tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32], npt.NDArray[np.int64]]


def new_stream(lanes: npt.NDArray[np.uint32], dim: int) -> Stream:
    """Generator state, a buffer of normals, and how many of them are used (all, so that the first call fills it)."""
    size = max(BUFFER, -(-4 * (dim + 8) // (2 * LANES)) * 2 * LANES)
    return lanes, np.zeros(size, np.float32), np.array([size], np.int64)


@compiled
def is_short(length: int, rest: int) -> bool:
    """Whether Q is drawn itself: too few tokens for the shortcut to pay, or for Bartlett's factor to exist."""
    return length < max(SHORT, rest + 4)


@compiled
def new_work(length: int, rest: int) -> Any:
    """The arrays of a prompt."""
    held = length if is_short(length, rest) else CHUNK
    return (
        np.zeros(12),
        np.zeros(12),
        np.zeros((4, rest)),
        np.zeros((4, rest)),
        np.zeros((rest, rest)),
        np.zeros((4, 4)),
        np.zeros(held, np.float32),
    )


@compiled
def take(stream: Any, count: int) -> Any:
    """The next ``count`` normals of the stream, side by side; what is left of a buffer that is too short is skipped."""
    lanes, buffer, used = stream
    first = used[0]
    if first + count > buffer.size:
        fill_normals(lanes, buffer)
        first = 0
    used[0] = first + count
    return buffer[first : first + count]


@compiled
def chi_square(stream: Any, freedom: int) -> float:
    """A chi-square number: squares summed up to 8 degrees of freedom, beyond Marsaglia and Tsang's rejection."""
    if freedom <= 8:
        total = 0.0
        for value in take(stream, freedom):
            total += float(value) ** 2
        return total
    shift = 0.5 * freedom - 1.0 / 3.0
    scale = 1.0 / math.sqrt(9.0 * shift)
    while True:
        three = take(stream, 3)
        x = float(three[0])
        cube = (1.0 + scale * x) ** 3
        # half the sum of two squared normals is exponential: -log of a uniform number
        exponential = 0.5 * (float(three[1]) ** 2 + float(three[2]) ** 2)
        if cube > 0.0 and -exponential < 0.5 * x * x + shift * (1.0 - cube + math.log(cube)):
            return 2.0 * shift * cube


# the tokens' own normals are never NaN, and a maximum is only vectorised where that is known
@numba.njit(cache=True, nogil=True, fastmath=True)
def largest(x: Any, factor: Any) -> Any:
    """max_i factor x_i."""
    found = factor * x[0]
    for i in range(x.size):
        found = max(found, factor * x[i])
    return found


@compiled
def sum_chunk(one: Any, two: Any, weight: Any, score: Any, shift: Any, along: Any, across: Any, sums: Any) -> None:
    """Sums over tokens with scores ``score g_1`` and values a = ``along g_1 + across g_2``; e = exp(score g_1 - shift).

    e, e g1, e g2, e g1^2, e g1 g2, e g2^2, e^2, e^2 a, e^2 a^2, g1^2, g1 g2, g2^2
    """
    zero = np.float32(0.0)
    s0, s1, s2, s3, s4, s5 = zero, zero, zero, zero, zero, zero
    s6, s7, s8, s9, s10, s11 = zero, zero, zero, zero, zero, zero
    for i in range(one.size):
        x, y = one[i], two[i]
        e = exp_of_negative(score * x - shift)
        weight[i] = e
        ex, ey, ea = e * x, e * y, e * (along * x + across * y)
        s0 += e
        s1 += ex
        s2 += ey
        s3 += ex * x
        s4 += ex * y
        s5 += ey * y
        s6 += e * e
        s7 += e * ea
        s8 += ea * ea
        s9 += x * x
        s10 += x * y
        s11 += y * y
    for k, value in enumerate((s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11)):
        sums[k] = value


@compiled
def rescale(sums: Any, factor: float) -> None:
    """The sums after their shift rose: e shrinks by ``factor``."""
    for k in range(6):
        sums[k] *= factor
    for k in range(6, 9):
        sums[k] *= factor * factor


@compiled
def long_prompt(stream: Any, length: int, score: float, along: float, across: float, work: Any) -> None:
    """Token sums, and C N, N and Bartlett's factor instead of Q (see the top of the module)."""
    sums, part, linear, normal, bartlett, gram, weight = work
    sums[:] = 0.0
    shift = -np.inf
    chunks = -(-length // CHUNK)
    for chunk in range(chunks):
        size = (length + chunk) // chunks
        pair = take(stream, 2 * size)
        one, two = pair[:size], pair[size:]
        peak = largest(one, np.float32(score))
        if not peak <= shift:
            if chunk > 0:
                rescale(sums, math.exp(shift - peak))
            shift = float(peak)
        sum_chunk(one, two, weight[:size], np.float32(score), np.float32(shift), np.float32(along), np.float32(across), part)
        for k in range(12):
            sums[k] += part[k]
    rank = factor_gram(sums, along, across, gram)
    rest = linear.shape[1]
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
        bartlett[i, i] = math.sqrt(chi_square(stream, length - rank - i))
        below = take(stream, i)
        for k in range(i):
            bartlett[i, k] = below[k]


@compiled
def factor_gram(sums: Any, along: float, across: float, gram: Any) -> int:
    """Cholesky factor (4 x rank) of W^T W, W = (g_1, g_2, e, e a); columns of dependent vectors are left out."""
    e1, e2 = sums[1], sums[2]
    a1, a2 = along * sums[3] + across * sums[4], along * sums[4] + across * sums[5]
    full = np.empty((4, 4))
    full[0, 0], full[1, 0], full[1, 1] = sums[9], sums[10], sums[11]
    full[2, 0], full[2, 1], full[2, 2] = e1, e2, sums[6]
    full[3, 0], full[3, 1], full[3, 2], full[3, 3] = a1, a2, sums[7], sums[8]
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
def short_prompt(stream: Any, length: int, score: float, along: float, across: float, work: Any) -> None:
    """Token sums and W^T Q, Q^T Q from all coordinates of all tokens; Q^T Q fills the square below."""
    sums, _, linear, _, square, _, weight = work
    pair = take(stream, 2 * length)
    one, two = pair[:length], pair[length:]
    peak = largest(one, np.float32(score))
    sum_chunk(one, two, weight, np.float32(score), peak, np.float32(along), np.float32(across), sums)
    linear[:] = 0.0
    square[:] = 0.0
    rest = linear.shape[1]
    if rest == 0:
        return
    first, second = one.copy(), two.copy()  # the buffer may be filled anew below
    for j in range(length):
        row = take(stream, rest)
        x, y, e = float(first[j]), float(second[j]), float(weight[j])
        ea = e * (along * x + across * y)
        for k in range(rest):
            q = float(row[k])
            linear[0, k] += x * q
            linear[1, k] += y * q
            linear[2, k] += e * q
            linear[3, k] += ea * q
            for i in range(k + 1):
                square[k, i] += q * float(row[i])


@compiled
def draw_tokens(stream: Any, length: int, score: float, along: float, across: float, work: Any) -> None:
    """All sums of a prompt whose tokens have scores ``score g_1`` and values ``along g_1 + across g_2``."""
    if is_short(length, work[2].shape[1]):
        short_prompt(stream, length, score, along, across, work)
    else:
        long_prompt(stream, length, score, along, across, work)


@compiled
def apply_square(work: Any, short: bool, x: Any, out: Any) -> None:
    """out = Q^T Q x."""
    _, _, _, normal, square, _, _ = work
    rest = x.size
    out[:] = 0.0
    if short:
        for k in range(rest):
            for i in range(k):
                out[k] += square[k, i] * x[i]
                out[i] += square[k, i] * x[k]
            out[k] += square[k, k] * x[k]
        return
    for i in range(4):
        product = 0.0
        for k in range(rest):
            product += normal[i, k] * x[k]
        for k in range(rest):
            out[k] += product * normal[i, k]
    for i in range(rest):  # T T^T x, column by column of the triangle T
        product = 0.0
        for k in range(i, rest):
            product += square[k, i] * x[k]
        for k in range(i, rest):
            out[k] += product * square[k, i]
