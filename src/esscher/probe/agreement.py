"""Predicted beside measured: rank correlations, over heads and over layers, of exponents that
theory gives with those fitted.

Spearman's rho between a column of heads.parquet that theory fills and one that was measured, with a
95 % interval: percentiles of the bootstrap over heads (or layers). Ranks are all it looks at, so
every decreasing function of the coupling has one rho: [B]'s proved and experimental exponents stand
apart in the table and agree in it. A layer's prediction is that of its slowest head, its
measurement that of its heads side by side.
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

from esscher.errors.more_text import BEYOND
from esscher.runs.columns import Column

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


# ---- One model on several kinds of text: what its heads are on each, and whether the same heads
# are slow on all of them.

COMPARED = ("beta_fit", "tokens_needed_10pct", "effective_tokens", "sink_mass", "khat", "coupling")
NEEDED = "tokens_needed_"

MEASURE = Column("measure", "word", "measure", "Column of the heads.")
HEADS = Column("heads", "int", "heads", "Heads that have the number.")
DOMAIN_COLUMNS = (
    Column("domain", "word", "domain", "Name of the text, which is that of its run."),
    MEASURE,
    Column(
        "median",
        "float",
        "median",
        "Median over heads; none where half of the heads need more than was measured.",
    ),
    Column("least", "float", "least", "Least over heads."),
    Column(
        "most", "float", "most", "Most over heads; none where a head needs more than was measured."
    ),
    HEADS,
)
RANK_COLUMNS = (
    MEASURE,
    Column("first", "word", "first domain", "One of two domains."),
    Column("second", "word", "second domain", "The other."),
    Column(
        "rho",
        "float",
        "rank correlation of heads",
        "Spearman's rank correlation, over heads, of the number in two domains.",
        ends=("rho_low", "rho_high"),
    ),
    Column(
        "rho_low",
        "float",
        "rank correlation of heads, low",
        "Lower end of its 95 % interval, by the bootstrap over heads.",
    ),
    Column(
        "rho_high",
        "float",
        "rank correlation of heads, high",
        "Upper end of its 95 % interval, by the bootstrap over heads.",
    ),
    Column(
        "change",
        "float",
        "median change",
        "Median over heads of the second domain's number over the first's.",
    ),
    HEADS,
)


def compare_domains(
    heads: Mapping[str, pd.DataFrame], seed: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of DOMAIN_COLUMNS and of RANK_COLUMNS, from the tables of heads by domain."""
    by_place = {name: _measured(table) for name, table in heads.items()}
    keys = [key for key in COMPARED if all(key in table for table in by_place.values())]
    domains = [
        _domain(name, key, _numbers(table[key])) for name, table in by_place.items() for key in keys
    ]
    ranks = []
    for key in keys:
        for first, second in itertools.combinations(by_place, 2):
            common = by_place[first].index.intersection(by_place[second].index)
            x, y = (_numbers(by_place[name].loc[common, key]) for name in (first, second))
            ranks.append({"measure": key, "first": first, "second": second} | _ranks(x, y, seed))
    return pd.DataFrame(domains, columns=_keys(DOMAIN_COLUMNS)), pd.DataFrame(
        ranks, columns=_keys(RANK_COLUMNS)
    )


def _keys(columns: tuple[Column, ...]) -> list[str]:
    return [column.key for column in columns]


def _measured(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["status"] == "ok"].set_index(["layer", "head"])


def _numbers(column: pd.Series) -> Floats:
    """NaN of tokens needed is more than was measured."""
    values = column.to_numpy(dtype=np.float64)
    return (
        np.where(np.isnan(values), math.inf, values)
        if str(column.name).startswith(NEEDED)
        else values
    )


def _domain(name: str, key: str, values: Floats) -> dict[str, str | float]:
    known = values[~np.isnan(values)]
    found = [float(part(known)) if known.size else math.nan for part in (np.median, np.min, np.max)]
    median, least, most = (value if math.isfinite(value) else math.nan for value in found)
    return {
        "domain": name,
        "measure": key,
        "median": median,
        "least": least,
        "most": most,
        "heads": known.size,
    }


def _ranks(x: Floats, y: Floats, seed: int) -> dict[str, float]:
    known = ~(np.isnan(x) | np.isnan(y))
    x, y = x[known], y[known]
    rho, low, high = rank_correlation(x, y, seed) if len(x) >= FEWEST else (math.nan,) * 3
    usable = np.isfinite(x) & np.isfinite(y) & (x != 0.0)
    change = float(np.median(y[usable] / x[usable])) if usable.any() else math.nan
    return {"rho": rho, "rho_low": low, "rho_high": high, "change": change, "heads": len(x)}


# ---- One model and one text, pools of several sizes: whether the intervals that a small pool
# gave hold what larger ones give.

SIZE_COLUMNS = (
    Column("number", "word", "number", "Which number of the heads."),
    Column("pool", "int", "pool", "Tokens of the pool whose intervals these are."),
    Column("larger", "int", "larger pool", "Tokens of the pool whose numbers they should hold."),
    Column("heads", "int", "heads", "Heads that have the number on both."),
    Column(
        "covered",
        "float",
        "covered",
        "Share of the heads whose interval holds the larger pool's number; an open end holds all.",
    ),
    Column(
        "beyond",
        "float",
        "beyond the pool",
        "Share of the heads whose number was beyond the smaller pool.",
    ),
    Column(
        "change",
        "float",
        "median change",
        "Median of the larger pool's number over the smaller's; of an exponent, the difference.",
    ),
)
EXPONENT = "beta_fit"


def compare_sizes(endless: Mapping[int, pd.DataFrame]) -> pd.DataFrame:
    """Rows of SIZE_COLUMNS from the tables ``endless`` of probes by the size of their pools, the
    smallest against others.
    """
    sizes = sorted(endless)
    place = ["layer", "head", "number"]
    small = endless[sizes[0]].set_index(place)
    rows = []
    for larger in sizes[1:]:
        other = endless[larger].set_index(place)["value"].rename("value_larger")
        both = small.join(other).dropna(subset=["value", "value_larger"])
        held = ~((both["low"] > both["value_larger"]) | (both["high"] < both["value_larger"]))
        change = both["value_larger"] / both["value"]
        change = change.where(
            both.index.get_level_values("number") != EXPONENT, both["value_larger"] - both["value"]
        )
        found = pd.DataFrame(
            {"covered": held, "beyond": both["status"] == BEYOND, "change": change}
        )
        for number, part in found.groupby(level="number", sort=False):
            means = {
                "covered": float(part["covered"].mean()),
                "beyond": float(part["beyond"].mean()),
            }
            row = {
                "number": number,
                "pool": sizes[0],
                "larger": larger,
                "heads": len(part),
                **means,
            }
            rows.append(row | {"change": float(part["change"].median())})
    return pd.DataFrame(rows, columns=[column.key for column in SIZE_COLUMNS])
