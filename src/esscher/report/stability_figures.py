"""Figures of flows from many first weights: how many have not arrived, and how far the two models
are from each other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from esscher.report.style import PALETTE, STYLE, beside, save_figure

__all__ = ["save_apart", "save_arrivals"]

DASHES = {"softmax": "-", "linear": "--"}
MEASURES = (
    ("weights2", "weights"),
    ("modulo2", "weights, modulo scale"),
    ("product2", "value times score"),
)


def save_arrivals(flows: Any, training: float, until: float, path: Path) -> None:
    """Share of starts that have not arrived against time, a panel for each covariance; dotted: the
    end of training.
    """
    names = list(dict.fromkeys(flows["covariance"]))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.0 * len(names) + 1.4, 3.0), layout="constrained")
        for ax, name in zip(
            np.atleast_1d(figure.subplots(1, len(names), sharey=True)), names, strict=True
        ):
            own = flows[flows["covariance"] == name]
            for i, (length, part) in enumerate(own.groupby("length")):
                for model, rows in part.groupby("model", sort=False):
                    times = np.sort(rows["arrival"].fillna(np.inf).to_numpy())
                    shares = 1.0 - np.arange(1, times.size + 1) / times.size
                    seen = times <= until
                    x = np.concatenate([[1.0], times[seen], [until]])
                    y = np.concatenate([[1.0], shares[seen], [1.0 - seen.mean()]])
                    label = f"{model}, L = {length:g}"
                    ax.step(
                        x,
                        y,
                        where="post",
                        color=PALETTE[i % len(PALETTE)],
                        ls=DASHES.get(str(model), ":"),
                        lw=1.1,
                        label=label,
                    )
            ax.axvline(training, color=PALETTE[6], ls=":", lw=0.8)
            ax.set(xscale="log", xlabel="time of the flow", title=name, ylim=(-0.02, 1.02))
        figure.axes[0].set_ylabel("share of starts not arrived")
        beside(figure.axes[-1])
        save_figure(figure, path)


def save_apart(distance: Any, flows: Any, training: float, path: Path) -> None:
    """Squared distance between the two models along the flow in three measures: medians over starts
    where both arrived.
    """
    keys = ["covariance", "length", "seed"]
    arrived = flows.groupby(keys)["status"].agg(lambda known: (known == "ok").all())
    there = distance[distance["time"] > 0].merge(arrived[arrived].reset_index()[keys], on=keys)
    names = list(dict.fromkeys(distance["covariance"]))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 2.4 * len(names) + 0.4), layout="constrained")
        rows = figure.subplots(len(names), len(MEASURES), sharex=True, sharey=True, squeeze=False)
        for name, axes in zip(names, rows, strict=True):
            own = there[there["covariance"] == name]
            for ax, (column, title) in zip(axes, MEASURES, strict=True):
                for i, (length, part) in enumerate(own.groupby("length")):
                    middle = part.groupby("time")[column].median()
                    ax.plot(
                        middle.index,
                        middle,
                        color=PALETTE[i % len(PALETTE)],
                        lw=1.1,
                        label=f"L = {length:g}",
                    )
                ax.axvline(training, color=PALETTE[6], ls=":", lw=0.8)
                ax.set(
                    xscale="log",
                    yscale="log",
                    title=title if name == names[0] else "",
                    ylim=(1e-10, 10.0),
                )
            axes[0].set_ylabel(f"squared distance, {name}", fontsize=7)
        for ax in rows[-1]:
            ax.set_xlabel("time of the flow")
        beside(rows[0][-1])
        save_figure(figure, path)
