"""Colours and sizes that the page and the figure files share, and how a figure becomes a file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from esscher.report.formats import check_format
from esscher.runs.files import check_output, write_durable

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


def beside(ax: Any) -> None:
    """The legend right of the axes, where it hides no point."""
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format its name ends with."""
    kind = check_format(path)
    check_output(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = io.BytesIO()
    figure.savefig(data, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else None)
    # takes the place of a link; what the link points to stays as it is
    write_durable(path, data.getvalue())
