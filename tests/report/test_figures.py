"""Figures for papers: axes hold every point, and legends hide none."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from esscher.report.exponents import TheoryLine
from esscher.report.figures import exponents_panel


def test_the_axes_of_exponents_hold_every_point_and_the_legend_hides_none() -> None:
    rates = pd.DataFrame(
        {"horizon2": [0.1, 1.0], "exponent": [0.663, 0.3], "low": [0.6, -0.05], "high": [0.72, 0.4], "sharp": [0.5, np.nan]}
    )
    figure = Figure(figsize=(5, 3), layout="constrained")
    ax = figure.subplots()
    exponents_panel(ax, rates, [TheoryLine("sharp", "sharp (heuristic)", "horizon2", "dashed", 1)])
    figure.draw_without_rendering()
    low, high = ax.get_ylim()
    assert low < -0.05
    assert high > 0.72
    legend = ax.get_legend()
    assert legend is not None
    assert legend.get_window_extent().x0 >= ax.get_window_extent().x1 - 1
