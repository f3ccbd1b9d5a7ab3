"""The two ways in which n keys come from a pool of N, by name."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["SAMPLINGS", "check_sampling"]

# n keys drawn independently; each key kept with probability n / N
SAMPLINGS = ("replacement", "bernoulli")


def check_sampling(sampling: str, n: npt.NDArray[np.int64], keys: int) -> None:
    """Raise where this is no sampling, or where more keys are to be kept than there are."""
    if sampling not in SAMPLINGS:
        raise ValueError(
            f"sampling: expected {' or '.join(map(repr, SAMPLINGS))}, got {sampling!r}"
        )
    if sampling == "bernoulli" and n.max() > keys:
        raise ValueError(
            f"n: keeping keys of a pool of {keys} gives at most {keys} tokens, got {n.max()}"
        )
