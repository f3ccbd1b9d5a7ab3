"""Exact error of attention from 10 to 10^12 tokens for horizons 0.25 to 4, beside the sharp rates
of that error.

``python examples/exact_error_figure.py [FILE]`` draws the figure of the README. Tokens and queries
are Gaussian in one dimension. The mean over queries is an integral, so nothing is random, and it
contains the rare queries that dominate the error at large n. The rate that [B] proves is for
moments, not for this error; ``esscher converge gaussian`` shows it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

import esscher as es
from esscher.report.figures import PALETTE, STYLE, save_figure
from esscher.theory.sharp import l2_exponent_rms

HORIZONS = (0.25, 0.5, 1.0, 2.0, 4.0)


def main(path: Path) -> None:
    law = es.Gaussian([[1.0]])
    n = np.unique(np.geomspace(10, 10**12, 111).round())
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.9), layout="constrained")
        ax = figure.subplots()
        for horizon, color in zip(HORIZONS, PALETTE, strict=False):
            head = es.Head([[horizon]], [[1.0]])
            curve = es.exact_curve(head, law, law, n)
            ax.plot(curve.n, curve.relative, color=color, lw=1.8, label=f"horizon {horizon:g}")
            sharp = curve.relative[-1] * (curve.n / curve.n[-1]) ** -l2_exponent_rms(horizon)
            ax.plot(curve.n, sharp, color=color, lw=0.8, ls="--")
        ax.plot([], [], color="k", lw=0.8, ls="--", label="sharp rate (heuristic)")
        ax.set(
            xscale="log",
            yscale="log",
            xlabel="tokens n",
            ylabel="relative rms error",
            ylim=(1e-6, 10),
        )
        ax.legend(loc="lower left")
        save_figure(figure, path)
    print(f"figure: {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "exact_error.svg"))
