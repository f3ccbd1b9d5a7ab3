"""One model and one text, pools of several sizes: whether the intervals that a small pool gave hold
what larger ones give.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from esscher.convergence.endless import BEYOND
from esscher.runs.columns import Column

__all__ = ["SIZE_COLUMNS", "compare_sizes"]

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
