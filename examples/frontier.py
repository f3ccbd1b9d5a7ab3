"""What keep rules cost the heads of a probed model: ``python examples/frontier.py RUN [RUN ...]``.

For each run of ``esscher probe --pool sequence``: the median over heads of the relative error at 5,
10 and 25 % of the keys; the share of the keys needed for an error of 10 %; for how many heads each
rule is the best; the kinds of heads by layer. A rule has no error at sizes below the keys that it
always keeps.
"""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd

import esscher as es
from esscher.probe.statistics.frontier import KINDS

SHARES = (0.05, 0.1, 0.25)


def errors(frontier: pd.DataFrame) -> list[str]:
    """A line for each rule: median relative error, and in brackets the quartiles, at three
    shares.
    """
    head = "".join(f"{share:>22.0%}" for share in SHARES)
    lines = [f"{'rule':34}{head}"]
    for rule, rows in frontier.groupby("rule", sort=False):
        cells = []
        for share in SHARES:
            own = rows.loc[rows["share"] == share, "relative"]
            low, middle, high = np.nanquantile(own, [0.25, 0.5, 0.75]) if len(own) else [np.nan] * 3
            cells.append(f"{middle:8.3f} ({low:.3f}, {high:.3f})")
        lines.append(f"{rule:34}" + "".join(f"{cell:>22}" for cell in cells))
    return lines


def heads(table: pd.DataFrame) -> list[str]:
    """Which rule serves most heads best, for a query and for a cache; the keys that takes; kinds by
    layer.
    """
    lines = []
    for kind, words in (("best", "for each query"), ("cache", "for a cache")):
        counts = table[f"{kind}_rule_10pct"].value_counts()
        share = (table[f"{kind}_kept_10pct"] / table["cache_keys"]).fillna(1.0)
        served = ", ".join(f"{rule} {count}" for rule, count in counts.items())
        lines.append(
            f"fewest keys for 10 %, {words}: {served}; median {share.median():.1%} of the keys"
        )
    floor = (table["floor_kept_10pct"] / table["cache_keys"]).fillna(1.0)
    lines.append(f"the floor: median {floor.median():.1%} of the keys")
    for kind in KINDS:
        own = table[table["kind"] == kind]
        layers = own["layer"].value_counts().sort_index()
        where = ", ".join(f"{layer}: {count}" for layer, count in layers.items())
        lines.append(
            f"{kind}: {len(own)} of {len(table)} heads"
            + (f" (layer: heads  {where})" if where else "")
        )
    return lines


def main() -> None:
    for path in sys.argv[1:]:
        run = es.load_run(path)
        frontier = run.table("frontier")
        held = frontier.groupby(["layer", "head"])["keys"].first().rename("cache_keys")
        table = run.table("heads").merge(held.reset_index(), how="left", on=["layer", "head"])
        keys, queries = float(frontier["keys"].mean()), int(frontier["queries"].max())
        print(f"{path}: {len(table)} heads, {keys:.0f} keys on average, {queries} queries judged")
        print("\n".join([*errors(frontier), *heads(table)]), end="\n\n")


if __name__ == "__main__":
    main()
