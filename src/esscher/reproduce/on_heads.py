"""What rules ask of the heads of a model: how many are slow, whether in the order of their
coupling, and what scaling does.
"""

from __future__ import annotations

import pandas as pd

from esscher.intervals import Interval
from esscher.reproduce.claim import Picture, Series
from esscher.reproduce.decide import mean_interval, rank_correlation, share_of

__all__ = [
    "FALL",
    "by_coupling",
    "fall_with_scale",
    "measured",
    "ordered_by_coupling",
    "slow_share",
]


FALL = 0.05  # of an exponent, from the smallest alpha to the largest, that is more than nothing


def measured(heads: pd.DataFrame) -> pd.DataFrame:
    """Heads of a probe that have numbers."""
    return heads[heads["status"] == "ok"]


def slow_share(heads: pd.DataFrame, column: str) -> Interval:
    """Share of heads whose exponent is below the 1/2 of an average."""
    known = heads[column].dropna()
    return share_of(int((known < 0.5).sum()), len(known))


def ordered_by_coupling(heads: pd.DataFrame, column: str) -> Interval:
    """Rank correlation of an exponent with the coupling: -1 where heads of higher coupling are
    slower without exception.
    """
    return rank_correlation(heads["coupling"], heads[column])


def fall_with_scale(scales: pd.DataFrame) -> Interval:
    """Mean over heads of the exponent at the smallest alpha less that at the largest (table
    ``scales`` of a probe).
    """
    exponents = scales[scales["status"] == "ok"].pivot(
        index=["layer", "head"], columns="scale", values="beta_fit"
    )
    return mean_interval((exponents.iloc[:, 0] - exponents.iloc[:, -1]).dropna())


def by_coupling(heads: pd.DataFrame, columns: dict[str, str]) -> Picture:
    """Exponents against the coupling, a series a column by its label."""
    x = heads["coupling"].to_numpy()
    series = [Series(label, x, heads[column].to_numpy()) for column, label in columns.items()]
    ends = [float(x.min()), float(x.max())]
    return Picture(
        "coupling Psi", "exponent", (*series, Series("1/2", ends, [0.5, 0.5], line=True)), log="x"
    )
