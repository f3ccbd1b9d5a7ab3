"""Colours, sizes and formats that the page and the figure files share; imports no matplotlib."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esscher.runs.store import write_durable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("svg", "pdf", "png")
# Okabe and Ito's colours, told apart by colour-blind readers too
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#000000"]
SCALE = "cividis"  # for whatever has an order; the same to colour-blind readers, and in grey
# places in the palette of the words a column may hold, in their order; then the last again
WORDS = (2, 0, 1, 4, 6, 3, 5)
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "svg.fonttype": "none",
    "svg.hashsalt": "esscher",
}
COLUMN = 3.4  # inches: one column of a paper
WIDE = 7.0  # both columns


def check_format(path: Path) -> str:
    """The format a figure's name asks for."""
    kind = path.suffix.removeprefix(".")
    if kind not in FORMATS:
        raise ValueError(
            f"figure: expected a file name ending in .{', .'.join(FORMATS)}, got {path.name!r}"
        )
    if path.is_dir():
        raise ValueError(f"figure: expected the name of a file, got the folder {path}")
    return kind


def beside(ax: Any) -> None:
    """The legend right of the axes, where it hides no point."""
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def say(ax: Any, text: str) -> Any:
    """A sentence in the middle of axes that have nothing to draw."""
    place = {"ha": "center", "va": "center", "transform": ax.transAxes}
    ax.text(0.5, 0.5, text[:200], wrap=True, parse_math=False, **place)
    return ax


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format its name ends with."""
    kind = check_format(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = io.BytesIO()
    figure.savefig(data, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else None)
    # takes the place of a link; what the link points to stays as it is
    write_durable(path, data.getvalue())
