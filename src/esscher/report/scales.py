"""Exponents of heads whose scores were multiplied, against the squared factor, as a page and
figures show them.
"""

from __future__ import annotations

from typing import Any

from esscher.report.exponents import theory_lines
from esscher.report.packing import numbers, text_of
from esscher.report.reading import read_table
from esscher.report.style import PALETTE, SCALE
from esscher.runs import Run

__all__ = ["draw_scales", "scales_content"]

MEASURED = "median of the heads"
TOP = 0.6  # of the axis of exponents, at least


def scales_content(run: Run) -> dict[str, Any]:
    """Points of heads and, at each scale, the medians over the heads of what was measured and of
    what theory says.
    """
    frame, every = _measured(run), read_table(run, "scales")
    if frame is None or every is None:
        return {}
    middle, lines = _medians(frame), theory_lines(run.columns("scales"))
    theory = [
        {
            "label": line.label,
            "dash": line.dash,
            "color": line.color,
            "y": numbers(middle[line.key]),
        }
        for line in lines
        if line.key in middle.columns
    ]
    points = {
        name: numbers(frame[name])
        for name in ("layer", "head", "beta_fit", "beta_low", "beta_high")
    }
    return {
        "scales": {
            "points": {**points, "squared": numbers(frame["squared"])},
            "squared": numbers(middle["squared"]),
            "median": numbers(middle["beta_fit"]),
            "theory": theory,
            "refused": len(every) - len(frame),
            "help": text_of(run.columns("scales")["beta_fit"].help),
        }
    }


def draw_scales(run: Run, ax: Any) -> Any:
    """Exponents against the squared factor: heads as points, medians as lines."""
    ax.set(xscale="log", xlabel="squared scale α²", ylabel="exponent", ylim=(0.0, TOP))
    ax.axhline(0.5, color=PALETTE[6], lw=0.8, ls=":")
    frame = _measured(run)
    if frame is None:
        ax.text(0.5, 0.5, "no scale was measured", ha="center", va="center", transform=ax.transAxes)
        return ax
    ax.scatter(
        frame["squared"],
        frame["beta_fit"],
        c=frame["layer"],
        cmap=SCALE,
        s=9,
        zorder=3,
        label="a head (dark: early layer)",
    )
    middle = _medians(frame)
    ax.plot(middle["squared"], middle["beta_fit"], color=PALETTE[0], lw=1.4, label=MEASURED)
    for line in theory_lines(run.columns("scales")):
        ax.plot(
            middle["squared"],
            middle[line.key],
            color=PALETTE[line.color],
            ls=line.dash,
            lw=1.0,
            label=line.label,
        )
    drawn = [frame["beta_fit"], *(middle[line.key] for line in theory_lines(run.columns("scales")))]
    low, high = min(part.min() for part in drawn), max(part.max() for part in drawn)
    ax.set_ylim(min(0.0, 1.1 * low), max(TOP, 1.1 * high))  # every point is in the picture
    # points and lines take the whole height
    ax.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2))
    return ax


def _measured(run: Run) -> Any | None:
    """The rows of scales that were measured, with the squared scale; None where there is none."""
    frame = read_table(run, "scales")
    if frame is None or not (frame["status"] == "ok").any():
        return None
    frame = frame[frame["status"] == "ok"]
    return frame.assign(squared=frame["scale"] ** 2)


def _medians(frame: Any) -> Any:
    return frame.groupby("squared", as_index=False).median(numeric_only=True)
