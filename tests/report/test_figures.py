"""Figures for papers: axes hold every point, and legends hide none."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import esscher as es
from esscher.report.charts import exponents_chart
from esscher.report.figures import draw_chart, prediction_charts
from esscher.runs import Column


def test_the_axes_of_exponents_hold_every_point_and_the_legend_hides_none() -> None:
    rates = pd.DataFrame(
        {
            "horizon2": [0.1, 1.0],
            "exponent": [0.663, 0.3],
            "low": [0.6, -0.05],
            "high": [0.72, 0.4],
            "sharp": [0.5, np.nan],
        }
    )
    figure = Figure(figsize=(5, 3), layout="constrained")
    ax = figure.subplots()
    columns = {
        "horizon2": Column("horizon2", "float", "horizon", "Help."),
        "sharp": Column("sharp", "float", "sharp", "Help.", of="horizon2", status="heuristic"),
    }
    draw_chart(exponents_chart(rates, "l2", columns), ax=ax)
    figure.draw_without_rendering()
    low, high = ax.get_ylim()
    assert low < -0.05
    assert high > 0.72
    legend = ax.get_legend()
    assert legend is not None
    assert legend.get_window_extent().x0 >= ax.get_window_extent().x1 - 1


def test_rates_of_moments_are_not_drawn_over_the_l2_error() -> None:
    """[B]'s exponent and the sharp one of moments are left to figures of moments; the sharp ones of
    the L2 error are there.
    """
    law, head = es.Gaussian([[1.0]]), es.Head([[1.2]], [[1.0]])
    curve = es.exact_curve(head, law, law, [10, 1000])
    error, exponents = prediction_charts(curve, es.predictions(head, law))
    names = {entry["label"].split()[0] for entry in exponents["series"]}
    assert names == {"exact,", "sharp-l2", "sharp-l2-rms", "s-prop31"}
    assert error["series"][0]["label"] == "exact"
    bounds = {entry["label"].split()[0] for entry in error["series"][1:]}
    assert bounds == {"s-16-mended", "s-16-sharpened"}
