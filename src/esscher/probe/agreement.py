"""Rank correlations over heads between predicted and measured exponents.

Spearman's rho has a 95 % interval: percentiles of the bootstrap over heads (or layers). A layer's
prediction is that of its slowest head, its measurement that of its heads side by side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import scipy.stats

from esscher.runs.columns import Column

Floats = npt.NDArray[np.float64]

FEWEST = 5  # of fewer no order is surprising: 4 agree by chance once in 24
RESAMPLES = 2000
LEVEL = 0.95

AGREEMENT = (
    Column("over", "word", "compared over", "Heads, or layers with their heads side by side."),
    Column("predicted", "word", "predicted", "Column of the heads that theory fills."),
    Column("measured", "word", "measured", "Column that was fitted."),
    Column("rho", "float", "rank correlation", "Spearman's rho.", ends=("rho_low", "rho_high")),
    Column("rho_low", "float", "rank correlation, low", "Lower end of its 95 % interval."),
    Column("rho_high", "float", "rank correlation, high", "Upper end of its 95 % interval."),
    Column("count", "int", "number compared", "Heads or layers that have both exponents."),
)


def rank_correlation(x: Floats, y: Floats, seed: int) -> tuple[float, float, float]:
    """Spearman's rho and the ends of its 95 % interval; NaN where x or y does not vary.

    A resample in which one of them does not vary has no rho, and is left out.
    """
    if len(np.unique(x)) < 2 or len(np.unique(y)) < 2:
        return math.nan, math.nan, math.nan
    rho = float(scipy.stats.spearmanr(x, y).statistic)
    rows = np.random.default_rng(seed).integers(0, len(x), size=(RESAMPLES, len(x)))
    a, b = (scipy.stats.rankdata(values[rows], axis=1) for values in (x, y))
    a, b = (ranks - ranks.mean(axis=1, keepdims=True) for ranks in (a, b))
    with np.errstate(invalid="ignore"):
        drawn = (a * b).sum(axis=1) / np.sqrt((a**2).sum(axis=1) * (b**2).sum(axis=1))
    low, high = np.nanquantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return rho, float(low), float(high)


def agreement_table(
    tables: Mapping[str, pd.DataFrame], columns: Sequence[Column], seed: int
) -> pd.DataFrame:
    """A row for every prediction and measurement among the ``columns`` of the heads; none where
    fewer than 5 have both.
    """
    predicted = [column.key for column in columns if column.of]
    measured = [column.key for column in columns if column.metric]
    heads, rows = tables["heads"], list[tuple[Any, ...]]()
    known = {"heads": heads}
    if "layers" in tables:
        slowest = heads.groupby("layer")[predicted].min()
        known["layers"] = tables["layers"].set_index("layer").join(slowest)
    for over, frame in known.items():
        for theory, fitted in itertools.product(predicted, measured):
            if theory in frame and fitted in frame:
                pair = frame[[theory, fitted]].to_numpy(dtype=np.float64)
                x, y = pair[np.isfinite(pair).all(axis=1)].T
                if len(x) >= FEWEST:
                    rho = rank_correlation(x, y, seed)
                    rows.append((over, theory, fitted, *rho, len(x)))
    return pd.DataFrame(rows, columns=[column.key for column in AGREEMENT])
