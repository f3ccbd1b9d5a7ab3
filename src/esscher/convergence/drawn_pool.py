"""A pool drawn from a law stands for it: how far that may be from the law's own error."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from torch import Tensor

__all__ = ["pool_stderr"]

Floats = npt.NDArray[np.float64]
PARTS = 8  # of a drawn pool


def pool_stderr(tokens: Tensor, rms: Callable[[Tensor], Floats]) -> Floats | None:
    """The standard error of ``rms(tokens)``, from its parts: independent pools, each a ``PARTS``-th
    as large.

    The error of a pool of N tokens is of order N^(-1/2), so parts spread sqrt(PARTS) times as much
    as whole pools do. None for a pool too small to have parts.
    """
    if len(tokens) < 2 * PARTS:
        return None
    parts = np.stack([rms(part) for part in tokens.chunk(PARTS)])
    return np.asarray(parts.std(axis=0, ddof=1) / math.sqrt(len(parts)))
