"""Tables made up to try decision rules on: errors with a known rate, as a run of ``esscher
converge`` would store them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

__all__ = ["made_errors"]

LADDER = (1000, 2000, 4000, 8000, 16000, 32000)


def made_errors(
    exponents: Mapping[tuple[int, str], float],
    seed: int,
    *,
    repeats: int = 60,
    n: tuple[int, ...] = LADDER,
) -> pd.DataFrame:
    """Squared errors of root mean square n^-exponent, for each (point, metric); repeats spread like
    chi-squared, 8 degrees.
    """
    rng = np.random.default_rng(seed)
    parts = []
    for (point, metric), exponent in exponents.items():
        squared = (
            np.array(n, dtype=np.float64) ** (-2 * exponent)
            * rng.chisquare(8, (repeats, len(n)))
            / 8
        )
        parts.append(
            pd.DataFrame(
                {
                    "point": point,
                    "metric": metric,
                    "repeat": np.repeat(np.arange(repeats), len(n)),
                    "n": np.tile(np.array(n), repeats),
                    "squared": squared.ravel(),
                    "limit_squared": 1.0,
                }
            )
        )
    return pd.concat(parts, ignore_index=True)
