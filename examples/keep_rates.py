"""How fast the error of kept keys falls: random keys and Neyman's; horizons 0.5 to 4.

``python examples/keep_rates.py [FILE]`` prints the rates and draws the figure of docs/keep.md.
Tokens and queries are Gaussian in one dimension, and n keys are kept of an infinite context.
Nothing is sampled: means over queries are integrals.
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

HORIZONS = (0.5, 1.0, 2.0, 4.0)
N = 4 ** np.arange(2, 11)
SHOWN = [0, 3, 6, 8]  # of N, in the table
LAW = es.Gaussian([[1.0]])


def curves(horizon: float) -> dict[str, np.ndarray]:
    """Relative errors of each rule at every n."""
    head = es.Head([[horizon]], [[1.0]])
    found = {
        "random": es.exact_curve(head, LAW, LAW, N, keep="random").rms,
        # the same at every query
        "neyman": es.exact_curve(head, LAW, [[1.0]], N, keep="neyman").rms,
    }
    # the limit's size is that of the horizon
    return {rule: rms / horizon for rule, rms in found.items()}


def exponent(rms: np.ndarray) -> float:
    """Over the last factor 16 of n."""
    return float(np.log(rms[-3] / rms[-1]) / np.log(N[-1] / N[-3]))


def show(found: dict[float, dict[str, np.ndarray]]) -> None:
    print(
        "horizon  rule         " + "".join(f"n = {N[i]:<10d}" for i in SHOWN) + "exponent  theory"
    )
    for horizon, rules in found.items():
        theory = {"random": l2_exponent_rms(horizon), "neyman": 0.5}
        for rule, rms in rules.items():
            errors = "".join(f"{rms[i]:<14.4g}" for i in SHOWN)
            print(f"{horizon:<8g} {rule:12s} {errors}{exponent(rms):<10.2f}{theory[rule]:.2f}")


def draw(found: dict[float, dict[str, np.ndarray]], path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 5.0), layout="constrained")
        for ax, (horizon, rules) in zip(
            figure.subplots(2, 2, sharex=True, sharey=True).flat, found.items(), strict=True
        ):
            for (rule, rms), color in zip(rules.items(), PALETTE, strict=False):
                ax.plot(N, rms, color=color, lw=1.8, label=rule)
            ax.plot(
                N,
                rules["neyman"][-1] * np.sqrt(N[-1] / N),
                color="k",
                lw=0.8,
                ls="--",
                label=r"$n^{-1/2}$",
            )
            ax.set(xscale="log", yscale="log", title=f"horizon {horizon:g}")
        figure.supxlabel("keys kept n")
        figure.supylabel("relative rms error")
        figure.axes[0].legend(loc="lower left")
        save_figure(figure, path)
    print(f"figure: {path}")


if __name__ == "__main__":
    results = {horizon: curves(horizon) for horizon in HORIZONS}
    show(results)
    draw(results, Path(sys.argv[1] if len(sys.argv) > 1 else "keep_rates.svg"))
