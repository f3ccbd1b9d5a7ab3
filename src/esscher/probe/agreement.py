"""Rank correlations and comparisons between heads: predicted with measured exponents, domains of
text with each other, pools of several sizes.

Spearman's rho has a 95 % interval: percentiles of the bootstrap over heads (or layers). A layer's
prediction is that of its slowest head, its measurement that of its heads side by side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
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
EXPONENT, NEEDED = "beta_fit", "tokens_needed_"
COMPARED = (EXPONENT, "tokens_needed_10pct", "effective_tokens", "sink_mass", "khat", "coupling")

RHO = (
    Column("rho", "float", "rank correlation", "Spearman's rho.", ends=("rho_low", "rho_high")),
    Column("rho_low", "float", "rank correlation, low", "Lower end of its 95 % interval."),
    Column("rho_high", "float", "rank correlation, high", "Upper end of its 95 % interval."),
)
AGREEMENT = (
    Column("over", "word", "compared over", "Heads, or layers with their heads side by side."),
    Column("predicted", "word", "predicted", "Column of the heads that theory fills."),
    Column("measured", "word", "measured", "Column that was fitted."),
    *RHO,
    Column("count", "int", "number compared", "Heads or layers that have both exponents."),
)
MEASURE = Column("measure", "word", "measure", "Column of the heads.")
HEADS = Column("heads", "int", "heads", "Heads that have the number.")
CHANGE = Column(
    "change",
    "float",
    "median change",
    "Median over heads of the second's over the first's; of an exponent of pools, the difference.",
)
DOMAIN_COLUMNS = (
    Column("domain", "word", "domain", "Name of the text, which is that of its run."),
    MEASURE,
    Column("median", "float", "median", "Median over heads; none: more than was measured."),
    Column("least", "float", "least", "Least over heads."),
    Column("most", "float", "most", "Most over heads; none: more than was measured."),
    HEADS,
)
RANK_COLUMNS = (
    MEASURE,
    Column("first", "word", "first domain", "One of two domains."),
    Column("second", "word", "second domain", "The other."),
    *RHO,
    CHANGE,
    HEADS,
)
SIZE_COLUMNS = (
    Column("number", "word", "number", "Which number of the heads."),
    Column("pool", "int", "pool", "Tokens of the pool whose intervals these are."),
    Column("larger", "int", "larger pool", "Tokens of the pool whose numbers they should hold."),
    HEADS,
    Column("covered", "float", "covered", "Share of heads whose interval holds the number."),
    Column("beyond", "float", "beyond the text", "Share of heads whose number was beyond it."),
    CHANGE,
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


def _ranks(x: Floats, y: Floats, seed: int) -> dict[str, float]:
    known = (math.nan,) * 3 if len(x) < FEWEST else rank_correlation(x, y, seed)
    return dict(zip(("rho", "rho_low", "rho_high"), known, strict=True))


def agreement_table(
    tables: Mapping[str, pd.DataFrame], columns: Sequence[Column], seed: int
) -> pd.DataFrame:
    """A row for every prediction and measurement among the ``columns`` of the heads; none where
    fewer than 5 have both.
    """
    predicted = [column.key for column in columns if column.of]
    measured = [column.key for column in columns if column.metric]
    heads, rows = tables["heads"], list[dict[str, Any]]()
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
                    place = {"over": over, "predicted": theory, "measured": fitted}
                    rows.append(place | _ranks(x, y, seed) | {"count": len(x)})
    return pd.DataFrame(rows, columns=[column.key for column in AGREEMENT])


# ---- one model on several texts


def compare_domains(
    heads: Mapping[str, pd.DataFrame], seed: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of DOMAIN_COLUMNS and of RANK_COLUMNS, from the tables of heads by domain."""
    known = {
        name: table[table["status"] == "ok"].set_index(["layer", "head"])
        for name, table in heads.items()
    }
    keys = [key for key in COMPARED if all(key in table for table in known.values())]
    domains = [_domain(name, key, table) for name, table in known.items() for key in keys]
    ranks = [
        {"measure": key, "first": first, "second": second}
        | _pair(known[first][key], known[second][key], seed)
        for key in keys
        for first, second in itertools.combinations(known, 2)
    ]
    return (
        pd.DataFrame(domains, columns=[column.key for column in DOMAIN_COLUMNS]),
        pd.DataFrame(ranks, columns=[column.key for column in RANK_COLUMNS]),
    )


def _numbers(column: pd.Series) -> pd.Series:
    """NaN of tokens needed is more than was measured."""
    return column.fillna(math.inf) if str(column.name).startswith(NEEDED) else column


def _domain(name: str, key: str, table: pd.DataFrame) -> dict[str, Any]:
    values = _numbers(table[key]).dropna()
    numbers = (values.median(), values.min(), values.max())
    median, least, most = (x if math.isfinite(x) else math.nan for x in numbers)
    row = {"domain": name, "measure": key, "median": median, "least": least, "most": most}
    return row | {"heads": len(values)}


def _pair(first: pd.Series, second: pd.Series, seed: int) -> dict[str, Any]:
    both = pd.concat([_numbers(first), _numbers(second)], axis=1, join="inner").dropna()
    x, y = both.to_numpy(dtype=np.float64).T
    usable = np.isfinite(x) & np.isfinite(y) & (x != 0.0)
    change = float(np.median(y[usable] / x[usable])) if usable.any() else math.nan
    return _ranks(x, y, seed) | {"change": change, "heads": len(x)}


# ---- one text in pools of several sizes


def compare_sizes(endless: Mapping[int, pd.DataFrame]) -> pd.DataFrame:
    """Whether the intervals of the smallest pool hold what larger ones give: rows of SIZE_COLUMNS
    from the tables ``endless`` of probes by the size of their pools.
    """
    return pd.DataFrame(_sizes(endless), columns=[column.key for column in SIZE_COLUMNS])


def _sizes(endless: Mapping[int, pd.DataFrame]) -> Iterator[dict[str, Any]]:
    place, (smallest, *others) = ["layer", "head", "number"], sorted(endless)
    small = endless[smallest].set_index(place)
    for larger in others:
        value = endless[larger].set_index(place)["value"].rename("larger")
        both = small.join(value).dropna(subset=["value", "larger"])
        for number, rows in both.groupby(level="number", sort=False):
            ratio = rows["larger"] / rows["value"]
            change = rows["larger"] - rows["value"] if number == EXPONENT else ratio
            outside = (rows["low"] > rows["larger"]) | (rows["high"] < rows["larger"])
            yield {
                "number": number,
                "pool": smallest,
                "larger": larger,
                "heads": len(rows),
                "covered": float((~outside).mean()),
                "beyond": float((rows["status"] == BEYOND).mean()),
                "change": float(change.median()),
            }
