"""How settled the numbers of a probe are, as its page shows it, and heads on pools of several sizes
as a figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from esscher.report.packing import parts_of, text_of
from esscher.report.reading import read_table
from esscher.report.style import PALETTE, STYLE, WIDE, save_figure
from esscher.runs import Run

__all__ = ["endless_content", "save_pool_sizes", "unsettled"]

NUMBERS = ("value", "half", "estimate", "low", "high")
SHOWN = 6  # heads in the figure of pool sizes
RELATIVE = "relative_"


def unsettled(run: Run) -> tuple[str, ...]:
    """The words of numbers that more text may change, as the run's column has them: all but the
    first, the best one.
    """
    return () if read_table(run, "endless") is None else run.columns("endless")["status"].words[1:]


def endless_content(run: Run, places: list[tuple[int, int]]) -> dict[str, Any]:
    """Of each head a row of numbers: label, NUMBERS, status; nothing where it was not measured.

    The last of the statuses is that of a number with a bound at best: what is stored as its
    estimate is not to be trusted.
    """
    frame = read_table(run, "endless")
    if frame is None or frame.empty:
        return {}
    columns, bounded = run.columns("heads"), unsettled(run)[-1:]
    labels = {
        key: columns[key].label if key in columns else key for key in dict.fromkeys(frame["number"])
    }
    found: dict[tuple[int, int], list[Any]] = {}
    for (layer, head), part in parts_of(frame, ["layer", "head"]):
        found[int(layer), int(head)] = [
            [text_of(labels[number]), *_known(told, status in bounded), text_of(status)]
            for number, *told, status in zip(
                *(part[name] for name in ("number", *NUMBERS, "status")), strict=True
            )
        ]
    words = {key: column.label for key, column in run.columns("endless").items()}
    head = [words[name] for name in ("number", *NUMBERS, "status")]
    return {"endless": [found.get(place) for place in places], "endless_labels": head}


def _known(told: list[float], bounded: bool) -> list[float | None]:
    """NUMBERS, None for what is missing."""
    return [
        x if math.isfinite(x) and not (bounded and name == "estimate") else None
        for name, x in zip(NUMBERS, told, strict=True)
    ]


def save_pool_sizes(runs: Mapping[str, Run], path: Path) -> Path:
    """Curves of some heads on pools of several sizes, and the intervals for an endless text that
    the smallest gave.
    """
    import matplotlib.pyplot as plt

    smallest = next(iter(runs.values()))
    heads = smallest.table("heads")
    with plt.rc_context(STYLE):
        chosen = _spread(heads)
        figure, axes = plt.subplots(2, 3, figsize=(WIDE, 4.4), sharex=True, layout="constrained")
        for ax in axes.flat[len(chosen) :]:
            ax.set_visible(False)
        for ax, row in zip(axes.flat, chosen, strict=False):
            _draw(ax, runs, row)
        for ax in axes[-1]:
            ax.set_xlabel("tokens n")
        label = smallest.columns("curves")["relative"].label
        for ax in axes[:, 0]:
            ax.set_ylabel(label)
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        save_figure(figure, path)
        plt.close(figure)
    return path


def _spread(heads: Any) -> list[Mapping[str, Any]]:
    """Heads from the least to the most demanding, evenly spread."""
    measured = heads[heads["status"] == "ok"].sort_values("relative_1024")
    places = np.unique(
        np.linspace(0, len(measured) - 1, min(SHOWN, len(measured))).round().astype(int)
    )
    rows: list[Mapping[str, Any]] = measured.iloc[places].to_dict("records")
    return rows


def _draw(ax: Any, runs: Mapping[str, Run], row: Mapping[str, Any]) -> None:
    """One head."""
    ax.set(xscale="log", yscale="log", title=f"{row['layer']}.{row['head']}: {row['settled']}")
    for color, (name, run) in zip(PALETTE[1:], runs.items(), strict=False):
        curves = run.table("curves")
        own = curves[
            (curves["layer"] == row["layer"])
            & (curves["head"] == row["head"])
            & (curves["metric"] == "l2")
        ]
        own = own[own["n"] <= int(name)].sort_values("n")
        ax.plot(own["n"], own["relative"], color=color, lw=1.1, label=f"{int(name):,} tokens")
    fixed = sorted(
        int(key.removeprefix(RELATIVE))
        for key in row
        if key.startswith(RELATIVE) and key.removeprefix(RELATIVE).isdigit()
    )
    low, high = (
        np.array([row[f"{RELATIVE}{n}_{end}"] for n in fixed], dtype=float)
        for end in ("low", "high")
    )
    known = np.isfinite(low) & np.isfinite(high)
    ax.vlines(
        np.array(fixed)[known],
        low[known],
        high[known],
        color=PALETTE[0],
        lw=3,
        alpha=0.6,
        label="endless text, 90 %",
    )
