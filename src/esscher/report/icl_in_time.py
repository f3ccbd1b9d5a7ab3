"""The flows of softmax and linear attention in time: risks, and the distance between them below the
bound of Lemma E.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from esscher.report.style import PALETTE, STYLE, beside, save_figure

__all__ = ["save_in_time"]

LINES = {"softmax": "-", "linear": "--", "limit": ":"}
APART = {"distance": "-", "sharper": "--", "bound": ":"}
HEADROOM = 1e3  # times the largest distance: where the picture ends


def save_in_time(trajectory: Any, apart: Any, columns: Mapping[str, Any], path: Path) -> None:
    """A row of two panels for each covariance: mean squared errors, and distances with what bounds
    them.
    """
    names = list(dict.fromkeys(trajectory["covariance"]))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 2.8 * len(names)), layout="constrained")
        for (left, right), name in zip(
            figure.subplots(len(names), 2, squeeze=False), names, strict=True
        ):
            own, distances = (
                trajectory[trajectory["covariance"] == name],
                apart[apart["covariance"] == name],
            )
            for i, length in enumerate(sorted(set(own["length"]))):
                color = PALETTE[i % len(PALETTE)]
                for model, style in LINES.items():
                    part = own[
                        (own["length"] == length) & (own["model"] == model) & (own["time"] > 0)
                    ]
                    left.plot(part["time"], part["mse"], color=color, ls=style, lw=1.0)
                part = distances[(distances["length"] == length) & (distances["time"] > 0)]
                for key, style in APART.items():
                    label = (
                        f"L = {length:g}, {columns[key].label}"
                        if i == 0
                        else f"L = {length:g}"
                        if key == "distance"
                        else None
                    )
                    right.plot(part["time"], part[key], color=color, ls=style, lw=1.0, label=label)
            left.set(xscale="log", yscale="log", xlabel="time", ylabel="mean squared error")
            left.set_title(f"{name}: softmax -, linear - -, limit ...", fontsize=8)
            right.set(
                xscale="log", yscale="log", xlabel="time", ylabel="distance of the parameters"
            )
            finite = own[own["model"] != "limit"]["mse"]
            left.set_ylim(0.5 * float(finite.min()), 2.0 * float(finite.max()))
            drawn = distances["distance"][distances["time"] > 0]
            right.set_ylim(0.5 * float(drawn.min()), HEADROOM * float(drawn.max()))
            beside(right)
        save_figure(figure, path)
