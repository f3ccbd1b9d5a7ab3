"""A stream of random numbers that compiled code takes from: normals out of a buffer, and
chi-squares made of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from esscher.icl.training.normals import LANES, compiled, fill_normals, seeded_lanes

__all__ = ["Stream", "chi_square", "new_stream", "take"]

BUFFER = 32 * 2 * LANES


class Stream(NamedTuple):
    """State of the generator, a buffer of normals, and how many of them are used, in an array of
    one.
    """

    lanes: npt.NDArray[np.uint32]
    buffer: npt.NDArray[np.float32]
    used: npt.NDArray[np.int64]


def new_stream(seed: int, dim: int) -> Stream:
    """The stream of a seed, its buffer used up; the buffer holds the most that prompts in ``dim``
    dimensions take at once.
    """
    size = max(BUFFER, -(-4 * (dim + 8) // (2 * LANES)) * 2 * LANES)
    return Stream(seeded_lanes(seed), np.zeros(size, np.float32), np.array([size], np.int64))


@compiled
def take(stream: Stream, count: int) -> npt.NDArray[np.float32]:
    """The next ``count`` normals of the stream, side by side; what is left of a buffer that is too
    short is skipped.
    """
    # once: in compiled code each look at a field counts references up and down
    lanes, buffer, used = stream
    first = used[0]
    if first + count > buffer.size:
        fill_normals(lanes, buffer)
        first = 0
    used[0] = first + count
    return buffer[first : first + count]


@compiled
def chi_square(stream: Stream, freedom: int) -> float:
    """A chi-square number: squares summed up to 8 degrees of freedom, beyond Marsaglia and Tsang's
    rejection.
    """
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
