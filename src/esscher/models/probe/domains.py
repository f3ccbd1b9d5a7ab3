"""One model on several kinds of text: what its heads are on each, and whether the same heads are
slow on all of them.

Tables of numbers that depend on the text, over the heads measured on each: medians by domain, and
for every two domains Spearman's rank correlation over heads, with the median change from the one to
the other. A head that needs more tokens than was measured counts as the most demanding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd

from esscher.models.probe.agreement import FEWEST, rank_correlation
from esscher.runs.columns import Column

__all__ = ["DOMAIN_COLUMNS", "RANK_COLUMNS", "compare_domains"]

Floats = npt.NDArray[np.float64]

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
