"""Heads of a language model by depth, beside those of an encoder: ``python
examples/language_model.py RUN [RUN ...]``.

A run is a folder that ``esscher probe`` wrote. For each of six depths: medians over its heads of
the measured exponent, effective tokens, weight on sinks and k-hat, and the share of heads with an
exponent below 0.3; then rank correlations of predicted with measured exponents.
"""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

import esscher as es

DEPTHS = 6
MEDIANS = {
    "beta_fit": "exponent",
    "effective_tokens": "effective",
    "sink_mass": "sinks",
    "khat": "k-hat",
}
PREDICTED = {
    "beta_paper": "paper, proved if Gaussian",
    "beta_paper_experimental": "paper, experimental",
    "beta_sharp": "sharp, heuristic",
}


def by_depth(heads: pd.DataFrame) -> pd.DataFrame:
    depth = np.minimum(heads["layer"] * DEPTHS // (heads["layer"].max() + 1), DEPTHS - 1)
    rows = heads.groupby(depth)
    found = rows[list(MEDIANS)].median().rename(columns=MEDIANS)
    first, last = rows["layer"].min().astype(str), rows["layer"].max().astype(str)
    found.insert(0, "layers", (first + "-" + last).where(first != last, first))
    found.insert(1, "heads", rows.size())
    found["below 0.3"] = rows["beta_fit"].apply(lambda beta: (beta < 0.3).mean())
    return found


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} RUN [RUN ...]")
    for path in sys.argv[1:]:
        run = es.load_run(path)
        heads, about = run.table("heads"), run.table("about").iloc[0]
        heads = heads[heads["status"] == "ok"]
        print(
            f"{about['model']}, pool {about['pool']}, {about['text']}, windows of"
            f" {about['window']}: {len(heads)} heads"
        )
        print(by_depth(heads).to_string(index=False, float_format="%.3g"))
        low, middle, high = heads["beta_fit"].quantile([0.1, 0.5, 0.9])
        print(
            f"exponents: a tenth below {low:.2f}, half below {middle:.2f}, nine tenths below"
            f" {high:.2f}"
        )
        for column, words in PREDICTED.items():
            rank = spearmanr(heads[column], heads["beta_fit"])
            off = (heads[column] - heads["beta_fit"]).abs().median()
            print(
                f"{words}: rank correlation {rank.statistic:+.2f} (p {rank.pvalue:.1g}), median"
                f" distance {off:.2f}"
            )
        if "kind" in heads:
            print(
                "kinds: "
                + ", ".join(
                    f"{kind} {count}" for kind, count in heads["kind"].value_counts().items()
                )
            )
        if "output_difference" in heads:
            print(
                "limits differ from the model's own outputs by"
                f" {heads['output_difference'].max():.1e} at most"
            )
        print()


if __name__ == "__main__":
    main()
