"""The page of a downstream run: readings against keys kept, errors layer by layer, predictions
against what was measured.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from esscher.report.charts import charts_page
from esscher.report.words import numbers, read_table, shortened
from esscher.runs import Run

COLORS = 8  # of the palette; more rules go round


def downstream_page(run: Run) -> dict[str, Any]:
    """Charts of what there is, then the tables."""
    charts = [*_readings(run), *_layers(run), *_predicted(run), *_propagated(run)]
    model = shortened(str(run.spec.get("model", "")))
    line = (
        f"What {model} says when its attention keeps a few keys, against the same model on all"
        " keys."
    )
    return charts_page(
        run,
        "A model that keeps a few keys",
        line,
        charts,
        first=["downstream", "correlations", "depth"],
    )


def _named(rule: str, split: str) -> str:
    return rule if split == "uniform" else f"{rule}, {split}"


def _readings(run: Run) -> list[dict[str, Any]]:
    """A chart a reading, a line a rule and split, with intervals over texts; of losses and
    divergences also the differences on the same texts.
    """
    table = read_table(run, "downstream")
    if table is None or not {"reading", "horizon", "share"} <= set(table.columns):
        return []
    columns = run.columns("downstream")
    meanings = dict(zip(columns["reading"].words, columns["reading"].meanings, strict=False))
    charts = []
    for reading, own in table[(table["horizon"] == "all") & table["share"].notna()].groupby(
        "reading", sort=False
    ):
        log = reading in ("kl", "error") and bool((own["value"] > 0).all())
        note = f"{meanings.get(str(reading), '')} With 95 % intervals over texts."
        charts.append(_against_share(run, own, "value", f"Reading: {reading}", note, log=log))
        for key in ("added", "behind"):
            # the divergence that is added is the divergence; older runs have neither
            if key in own and own[key].notna().any() and (reading, key) != ("kl", "added"):
                title = f"Reading: {reading}, {columns[key].label}"
                charts.append(_against_share(run, own, key, title, columns[key].help))
    return charts


def _against_share(
    run: Run, own: pd.DataFrame, key: str, title: str, note: str, *, log: bool = False
) -> dict[str, Any]:
    """A column of one reading against the share of the cache that is kept."""
    columns, series = run.columns("downstream"), []
    low, high = columns[key].ends or ("low", "high")
    for i, ((rule, split), part) in enumerate(own.groupby(["rule", "split"], sort=False)):
        part = part.sort_values("share")
        ends = {"low": numbers(part[low]), "high": numbers(part[high])}
        points = {"x": numbers(part["share"]), "y": numbers(part[key]), **ends}
        series.append({"label": _named(str(rule), str(split)), "color": i % COLORS, **points})
    share = columns["share"]
    return {
        "title": title,
        "note": f"{note} {share.label.capitalize()}: {share.help}",
        "x": {"label": share.label, "log": True},
        "y": {"label": str(own["reading"].iloc[0]), "log": log},
        "series": series,
    }


def _layers(run: Run) -> list[dict[str, Any]]:
    """Errors through the depth at the middle size: of attention at fixed inputs, and of the inputs
    themselves.
    """
    table = read_table(run, "layers")
    if table is None or not len(table):
        return []
    sizes = sorted(table["size"].unique())
    own = table[table["size"] == sizes[len(sizes) // 2]]
    charts = []
    for key in ("fixed", "inputs"):
        column = run.columns("layers")[key]
        series = [
            {
                "label": _named(str(rule), str(split)),
                "color": i % COLORS,
                "x": numbers(part["layer"]),
                "y": numbers(part[key]),
            }
            for i, ((rule, split), part) in enumerate(own.groupby(["rule", "split"], sort=False))
        ]
        axes = {
            "x": {"label": run.columns("layers")["layer"].label, "log": False},
            "y": {"label": column.label, "log": False},
        }
        title = f"Layer by layer: {column.label}, size {sizes[len(sizes) // 2]:g}"
        charts.append({"title": title, "note": column.help, **axes, "series": series})
    return charts


def _predicted(run: Run) -> list[dict[str, Any]]:
    """One head at a time: measured divergence against each predictor."""
    heads, found = read_table(run, "sensitivity"), read_table(run, "correlations")
    if heads is None or found is None:
        return []
    charts, columns = [], run.columns("sensitivity")
    for row in found.to_dict("records"):
        name = str(row["predictor"])
        own = heads[
            (heads["rule"] == row["rule"])
            & (heads["size"] == row["size"])
            & (heads[name] > 0)
            & (heads["kl"] > 0)
        ]
        series = [
            {
                "label": "a head",
                "mode": "points",
                "color": 0,
                "x": numbers(own[name]),
                "y": numbers(own["kl"]),
            }
        ]
        note = (
            f"{columns[name].help} Rank correlation {row['rho']:.2f} [{row['low']:.2f},"
            f" {row['high']:.2f}]."
        )
        axes = {
            "x": {"label": columns[name].label, "log": True},
            "y": {"label": columns["kl"].label, "log": True},
        }
        charts.append(
            {
                "title": f"One head at a time: {columns[name].label}",
                "note": note,
                **axes,
                "series": series,
            }
        )
    return charts


def _propagated(run: Run) -> list[dict[str, Any]]:
    """One layer at a time: change of the logits, measured and to first order."""
    table = read_table(run, "propagation")
    if table is None:
        return []
    own: pd.DataFrame = table[table["layer"] >= 0].sort_values("layer")
    columns = run.columns("propagation")
    series = [
        {
            "label": columns[key].label,
            "color": i,
            "x": numbers(own["layer"]),
            "y": numbers(own[key]),
        }
        for i, key in enumerate(("error", "first_order"))
    ]
    axes = {
        "x": {"label": columns["layer"].label, "log": False},
        "y": {"label": columns["error"].label, "log": True},
    }
    note = (
        "Keys are dropped in one layer alone; the first order is a Jacobian-vector product of its"
        " heads' errors."
    )
    return [{"title": "One layer at a time", "note": note, **axes, "series": series}]
