"""The tails of the tokens that enter each layer, on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from esscher.cli.tables import Form, show_table, shown

if TYPE_CHECKING:
    from esscher.runs import Run

__all__ = ["show_tails"]

COLUMNS: dict[str, Form] = {
    "layer": ".0f",
    "norm_tail": "",
    "norm_shape": ".2f",
    "norm_sigma": ".2f",
    "coordinate_tail": "",
    "coordinate_shape": ".2f",
    "coordinate_sigma": ".2f",
}
TITLE = "tokens that enter each layer: the law of their largest norms and coordinates"


def show_tails(run: Run) -> None:
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
            forms[f"{kind}_tail_text"] = ""
    show_table(TITLE, [shown(columns[key], rows, form) for key, form in forms.items()])
