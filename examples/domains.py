"""One model on three kinds of text: prose, code and law, side by side.

``python examples/domains.py [FOLDER] [FIGURE]`` probes the packaged model on three packaged texts:
Python's manual, its standard library, and licences. The three runs are stored in FOLDER
(runs/domains by default); runs that were stopped are completed. It prints what differs and draws a
figure (FOLDER/domains.svg by default).
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
from esscher.runs import terminal

DOMAINS = {"prose": "prose", "code": "code", "legal": "law"}
REGIMES = ("diffuse", "selective", "frozen", "sink-dominated")


def measure(folder: Path) -> dict[str, pd.DataFrame]:
    """The heads of each domain."""
    return {
        name: (
            es.probe(out=folder / name, packaged=name, workers=2, progress=terminal()).table(
                "heads"
            )
        )
        for name in DOMAINS
    }


def show(heads: dict[str, pd.DataFrame]) -> None:
    print(f"{'text':<8}{'median exponent':>16}{'lowest':>8}{'median tokens for 10 %':>24}  regimes")
    for name, table in heads.items():
        counts = table["regime"].value_counts()
        regimes = ", ".join(f"{counts[regime]} {regime}" for regime in REGIMES if regime in counts)
        exponents, tokens = table["beta_fit"], table["tokens_needed_10pct"]
        print(
            f"{DOMAINS[name]:<8}{exponents.median():>16.3f}{exponents.min():>8.3f}{tokens.median():>24,.0f}"
            f"  {regimes}"
        )
    base = heads["prose"]["beta_fit"]
    for name in ("code", "legal"):
        moved = heads[name]["beta_fit"] - base
        print(
            f"exponent on {DOMAINS[name]} less that on prose: median {moved.median():+.3f},"
            f" {int((moved < 0).sum())} of {len(moved)} heads lower, rank correlation of the two"
            f" {base.corr(heads[name]['beta_fit'], method='spearman'):.2f}"
        )


def draw(heads: dict[str, pd.DataFrame], path: Path) -> None:
    """Left: each head's exponent on code and law against prose. Right: how many heads are in which
    regime.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.0, 3.0), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[1.2, 1])
        base = heads["prose"]
        for name, color in (("code", PALETTE[1]), ("legal", PALETTE[2])):
            other = heads[name]
            across = np.stack(
                [base["beta_fit"] - base["beta_low"], base["beta_high"] - base["beta_fit"]]
            ).clip(0)
            along = np.stack(
                [other["beta_fit"] - other["beta_low"], other["beta_high"] - other["beta_fit"]]
            ).clip(0)
            x, y = base["beta_fit"], other["beta_fit"]
            left.errorbar(
                x,
                y,
                yerr=along,
                xerr=across,
                fmt="o",
                ms=3,
                lw=0.5,
                color=color,
                label=DOMAINS[name],
            )
        ends = [0.2, 0.52]
        left.plot(ends, ends, color="k", lw=0.6, ls=":")
        left.set(
            xlabel="exponent on prose", ylabel="exponent on the other text", xlim=ends, ylim=ends
        )
        left.legend()
        bottom = np.zeros(len(heads))
        names = [DOMAINS[name] for name in heads]
        for regime, color in zip(
            REGIMES, (PALETTE[2], PALETTE[0], PALETTE[1], PALETTE[4]), strict=True
        ):
            counts = np.array([(table["regime"] == regime).sum() for table in heads.values()])
            if counts.any():
                right.bar(names, counts, bottom=bottom, color=color, label=regime, width=0.6)
                bottom += counts
        right.set(ylabel="heads", ylim=(0, bottom.max() * 1.25))
        right.legend(ncols=2, loc="upper center")
        right.grid(axis="x", visible=False)
    save_figure(figure, path)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/domains")
    found = measure(folder)
    show(found)
    draw(found, Path(sys.argv[2]) if len(sys.argv) > 2 else folder / "domains.svg")
