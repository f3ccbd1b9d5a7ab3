"""The tails of the tokens that enter each layer, on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from esscher.cli.tables import Form, show_table, shown

if TYPE_CHECKING:
    from esscher.runs import Run

__all__ = ["show_tails"]

# How numbers are written, and which columns give way where there is no room
COLUMNS: dict[str, tuple[Form, int]] = {
    "layer": (".0f", 0),
    "norm_tail": ("", 0),
    "norm_shape": (".2f", 3),
    "norm_sigma": (".2f", 4),
    "coordinate_tail": ("", 0),
    "coordinate_shape": (".2f", 2),
    "coordinate_sigma": (".2f", 5),
}
TITLE = "tokens that enter each layer: the law of their largest norms and coordinates"


def show_tails(run: Run, look: Mapping[str, Any]) -> None:
    """A line for each layer; what first and special tokens change is named."""
    if "layers" not in run.tables:
        return
    layers, columns = run.table("layers"), run.columns("layers")
    if not set(COLUMNS) <= set(columns):  # a run of an older version
        return
    rows = layers.to_dict("records")
    forms = dict(COLUMNS)
    for kind in ("coordinate", "norm"):
        if (layers[f"{kind}_tail"] != layers[f"{kind}_tail_text"]).any():
            forms[f"{kind}_tail_text"] = ("", 1)
    show_table(
        TITLE,
        [shown(columns[key], rows, form, gives_way=last) for key, (form, last) in forms.items()],
        look,
    )
