"""The page of a compression run: metrics against the share of the cache, predicted against measured
loss, loss by layer.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from esscher.report.charts import charts_page
from esscher.report.words import numbers, read_table, shortened
from esscher.runs import Run

COLORS = 8  # of the palette; more rules go round
SHOWN = ("kl", "kl_behind", "loss_added", "agreement", "needle", "cosine", "neighbour", "error")


def compression_page(run: Run) -> dict[str, Any]:
    """Charts of what there is, then the tables."""
    charts = [*_metrics(run), *_checked(run), *_by_layer(run)]
    model = shortened(str(run.spec.get("model", "")))
    line = f"What the answers of {model} lose when its KV cache is compressed."
    return charts_page(run, "Compressing a KV cache", line, charts, first=["compress", "depth"])


def _lines(own: pd.DataFrame, x: str, y: str, ends: tuple[str, str] | None) -> list[dict[str, Any]]:
    """A line for each rule and split."""
    found = []
    for i, ((rule, split), part) in enumerate(own.groupby(["rule", "split"], sort=False)):
        part = part.sort_values(x)
        points = {"x": numbers(part[x]), "y": numbers(part[y])}
        if ends is not None:
            points |= {"low": numbers(part[ends[0]]), "high": numbers(part[ends[1]])}
        label = str(rule) if split in ("uniform", "cut") else f"{rule}, {split}"
        found.append({"label": label, "color": i % COLORS, **points})
    return found


def _metrics(run: Run) -> list[dict[str, Any]]:
    """A chart for each metric against the share of the cache, with intervals over texts."""
    table = read_table(run, "compress")
    if table is None or "share" not in table:
        return []
    own, columns, charts = table[table["rule"] != "full"], run.columns("compress"), []
    for key in SHOWN:
        if key in own and own[key].notna().any():
            log = key in ("kl", "error") and bool((own[key] > 0).all())
            axes = {
                "x": {"label": columns["share"].label, "log": True},
                "y": {"label": columns[key].label, "log": log},
            }
            series = _lines(own[own[key].notna()], "share", key, columns[key].ends)
            note = f"{columns[key].help} With 95 % intervals over texts."
            charts.append({"title": columns[key].label, "note": note, **axes, "series": series})
    return charts


def _checked(run: Run) -> list[dict[str, Any]]:
    """Measured against predicted loss, a point for each rule and size, and the diagonal."""
    table = read_table(run, "compress")
    if table is None or "kl_predicted" not in table:
        return []
    own = table[(table["kl_predicted"] > 0) & (table["kl"] > 0)]
    if not len(own):
        return []
    ends = [float(x) for x in (own[["kl", "kl_predicted"]].min().min(), own["kl"].max())]
    series = [row | {"mode": "points"} for row in _lines(own, "kl_predicted", "kl", None)]
    series.append({"label": "predicted = measured", "color": 7, "x": ends, "y": ends})
    axes = {
        "x": {"label": "predicted KL, nats per token", "log": True},
        "y": {"label": "measured KL, nats per token", "log": True},
    }
    note = (
        "Predicted from the exact errors of all heads at the decoded tokens and their Fisher"
        " metric, no constant fitted. Second order: right below about 0.2 nats."
    )
    return [{"title": "Predicted against measured loss", "note": note, **axes, "series": series}]


def _by_layer(run: Run) -> list[dict[str, Any]]:
    """Predicted loss of each layer at the middle size."""
    table = read_table(run, "layers")
    if table is None or not len(table):
        return []
    sizes = sorted(table["keep"].dropna().unique())
    own = table[table["keep"] == sizes[len(sizes) // 2]] if sizes else table
    columns = run.columns("layers")
    axes = {
        "x": {"label": columns["layer"].label, "log": False},
        "y": {"label": columns["nats"].label, "log": bool((own["nats"] > 0).all())},
    }
    title = "Predicted loss by layer" + (f", {sizes[len(sizes) // 2]:.0%} kept" if sizes else "")
    series = _lines(own, "layer", "nats", None)
    return [{"title": title, "note": columns["nats"].help, **axes, "series": series}]
