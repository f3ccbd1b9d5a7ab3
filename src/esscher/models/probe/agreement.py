"""Predicted beside measured: rank correlations, over heads and over layers, of exponents that
theory gives with those fitted.

Spearman's rho between a column of heads.parquet that theory fills and one that was measured, with a
95 % interval: percentiles of the bootstrap over heads (or layers). Ranks are all it looks at, so
every decreasing function of the coupling has one rho: [B]'s proved and experimental exponents stand
apart in the table and agree in it. A layer's prediction is that of its slowest head, its
measurement that of its heads side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import scipy.stats

from esscher.runs.columns import Column

__all__ = ["AGREEMENT", "agreement_table", "rank_correlation"]

Floats = npt.NDArray[np.float64]

FEWEST = 5  # of fewer no order is surprising: 4 agree by chance once in 24
RESAMPLES = 2000
LEVEL = 0.95

AGREEMENT = (
    Column(
        "over",
        "word",
        "compared over",
        "What is put in order: heads, or layers with their heads side by side.",
    ),
    Column("predicted", "word", "predicted", "Column of the heads that theory fills."),
    Column(
        "measured", "word", "measured", "Column of the heads, or of the layers, that was fitted."
    ),
    Column(
        "rho",
        "float",
        "rank correlation",
        "Spearman's rank correlation of predicted and measured exponents.",
        ends=("rho_low", "rho_high"),
    ),
    Column(
        "rho_low",
        "float",
        "rank correlation, low",
        "Lower end of its 95 % interval, by the bootstrap.",
    ),
    Column(
        "rho_high",
        "float",
        "rank correlation, high",
        "Upper end of its 95 % interval, by the bootstrap.",
    ),
    Column("count", "int", "number compared", "Heads or layers that have both exponents."),
)


def agreement_table(
    tables: Mapping[str, pd.DataFrame], columns: Sequence[Column], seed: int
) -> pd.DataFrame:
    """A row for every prediction and measurement among the ``columns`` of the heads; none where
    fewer than 5 have both.
    """
    predicted = [column.key for column in columns if column.of]
    measured = [column.key for column in columns if column.metric]
    heads = tables["heads"]
    slowest = heads.groupby("layer")[predicted].min()
    layers = tables["layers"].set_index("layer") if "layers" in tables else pd.DataFrame()
    rows: list[dict[str, Any]] = []
    for over, known in (("heads", heads), ("layers", layers.join(slowest))):
        for theory in predicted:
            for fitted in measured:
                if fitted in known.columns and theory in known.columns:
                    x, y = (known[key].to_numpy(dtype=np.float64) for key in (theory, fitted))
                    both = np.isfinite(x) & np.isfinite(y)
                    if both.sum() >= FEWEST:
                        rho, low, high = rank_correlation(x[both], y[both], seed)
                        found = {
                            "over": over,
                            "predicted": theory,
                            "measured": fitted,
                            "rho": rho,
                            "rho_low": low,
                        }
                        rows.append(found | {"rho_high": high, "count": int(both.sum())})
    return pd.DataFrame(rows, columns=[column.key for column in AGREEMENT])


def rank_correlation(x: Floats, y: Floats, seed: int) -> tuple[float, float, float]:
    """Spearman's rho and the ends of its 95 % interval; NaN where x or y does not vary.

    A resample in which one of them does not vary has no rho, and is left out.
    """
    rho = float(_spearman(x, y))
    if not np.isfinite(rho):
        return (np.nan, np.nan, np.nan)
    rows = np.random.default_rng(seed).integers(0, len(x), size=(RESAMPLES, len(x)))
    drawn = _spearman(x[rows], y[rows])
    low, high = np.nanquantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return rho, float(low), float(high)


def _spearman(x: Floats, y: Floats) -> Floats:
    """Pearson's correlation of ranks, ties sharing theirs, for many resamples at once."""
    x, y = (scipy.stats.rankdata(values, axis=-1) for values in (x, y))
    x, y = (ranks - ranks.mean(axis=-1, keepdims=True) for ranks in (x, y))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((x * y).sum(axis=-1) / np.sqrt((x**2).sum(axis=-1) * (y**2).sum(axis=-1)))
