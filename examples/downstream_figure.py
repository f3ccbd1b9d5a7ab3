"""Divergence of next tokens against the share of keys kept, a line a rule, each with its better
split.

``python examples/downstream_figure.py RUN ... FILE``: runs of ``esscher downstream`` on the same
texts. Of a rule and split that several of them have, the last counts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import esscher as es
from esscher.report.figures import PALETTE, STYLE, save_figure


def main(arguments: list[str]) -> None:
    *runs, file = arguments
    tables = [es.load_run(Path(run)).table("downstream") for run in runs]
    table = pd.concat([own[(own["horizon"] == "all") & (own["reading"] == "kl")] for own in tables])
    table = table.drop_duplicates(["rule", "split", "size"], keep="last").sort_values("share")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.9), layout="constrained")
        ax = figure.subplots()
        for i, (rule, own) in enumerate(table.groupby("rule", sort=False)):
            split = own.groupby("split")["value"].agg(lambda values: np.log(values).mean()).idxmin()
            best = own[own["split"] == split]
            short = str(rule).removeprefix("sinks:4+").removeprefix("recent:32+")
            style = {
                "color": PALETTE[i % len(PALETTE)],
                "ls": "-" if i < len(PALETTE) else ":",
                "marker": "o",
                "ms": 3,
            }
            ax.plot(best["share"], best["value"], label=f"{short}, {split}", **style)
        ax.set(
            xscale="log",
            yscale="log",
            xlabel="share of the cache kept",
            ylabel="divergence of the next token (nats)",
        )
        ax.legend(fontsize=7)
        save_figure(figure, Path(file))
    print(f"figure: {file}")


if __name__ == "__main__":
    main(sys.argv[1:])
