"""The page of a downstream run: readings against keys kept, errors layer by layer, predictions
against what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from esscher.report.words import (
    columns_of,
    described,
    numbers,
    overview,
    read_table,
    settings_line,
    shortened,
    theory_lines,
)
from esscher.runs import Run
from esscher.runs.columns import Column

MOST_ROWS = 5000  # of a table on the page; the rest stays in the run


def sweep(run: Run) -> dict[str, Any]:
    """Errors against n and exponents against the horizon, for each kind of error that a sweep over
    laws measured.
    """
    charts = []
    rates, curves = read_table(run, "rates"), read_table(run, "curves")
    over = str((run.spec.get("sweep") or {}).get("over", ""))
    for metric in () if rates is None else dict.fromkeys(rates["metric"]):
        assert rates is not None
        if curves is not None:
            charts.append(_errors(curves[curves["metric"] == metric], str(metric), over))
        charts.append(
            _exponents(rates[rates["metric"] == metric], str(metric), run.columns("rates"))
        )
    law = run.spec.get("law") or {}
    what = (
        ", ".join(f"{key} {value}" for key, value in law.items() if value not in (None, 0.0))
        or "a law"
    )
    swept = f", swept over {over}" if over else ""
    line = (
        f"Attention on tokens of {shortened(what)}{swept}; error against the limit on infinitely"
        " many tokens."
    )
    return charts_page(
        run, str(run.spec.get("title") or "Sweep over laws"), line, charts, first=["rates"]
    )


def charts_page(
    run: Run, title: str, line: str, charts: list[dict[str, Any]], first: list[str]
) -> dict[str, Any]:
    """A page of charts with the run's tables below, those named first in front."""
    content = overview(run, "charts", title, [line, settings_line(run)])
    charts = [chart for chart in charts if chart["series"]]
    tables = _tables(run, first)
    if not tables:
        content["warnings"].append("This run has no table yet, so there is nothing to show.")
    return content | {"charts": charts, "tables": tables}


def tables_page(run: Run) -> dict[str, Any]:
    """A plain page for a job that has no views of its own."""
    title = str(run.spec.get("title") or run.manifest.job)
    return charts_page(
        run, title, f"Run of {shortened(run.manifest.job)}, shown as tables.", [], first=[]
    )


def _errors(curves: Any, metric: str, over: str) -> dict[str, Any]:
    series = []
    last = max(1, int(curves["point"].max())) if len(curves) else 1
    for (point, kind), part in curves.groupby(["point", "kind"]):
        value = part["value"].iloc[0]
        sampled = kind == "montecarlo"
        entry: dict[str, Any] = {
            "label": f"{over} {value:g}" if over and value == value else str(kind),
            "unlisted": not sampled,
            "mode": "points" if sampled else "line",
            "shade": round(0.9 * int(point) / last, 3),
            "x": numbers(part["n"]),
            "y": numbers(part["rms"]),
        }
        if sampled:
            entry |= {
                "low": numbers(part["rms"] - 2 * part["stderr"]),
                "high": numbers(part["rms"] + 2 * part["stderr"]),
            }
        series.append(entry)
    return {
        "title": f"Error of {metric} against tokens",
        "note": (
            "Points: measured, with two standard errors. Lines: exact. Dark to light: the sweep"
            " from first to last."
        ),
        "x": {"label": "tokens n", "log": True},
        "y": {"label": f"rms error ({metric})", "log": True},
        "series": series,
    }


def _exponents(rates: Any, metric: str, columns: Mapping[str, Column]) -> dict[str, Any]:
    rates = rates[rates["exponent"].notna()].sort_values("horizon2")
    x = numbers(rates["horizon2"])
    series: list[dict[str, Any]] = []
    if len(rates):
        low, high = numbers(rates["low"]), numbers(rates["high"])
        y = numbers(rates["exponent"])
        series.append(
            {
                "label": "measured",
                "mode": "points",
                "color": 0,
                "x": x,
                "y": y,
                "low": low,
                "high": high,
            }
        )
    for line in theory_lines(columns):
        if rates[line.key].notna().any():
            series.append(
                {
                    "label": line.label,
                    "dash": line.dash,
                    "color": line.color,
                    "x": x,
                    "y": numbers(rates[line.key]),
                }
            )
    return {
        "title": f"Exponent of {metric} against the horizon",
        "note": "The error falls as n to minus the exponent; 0.5 is the square-root law.",
        "x": {"label": columns["horizon2"].label, "log": True},
        "y": {"label": "exponent", "log": False, "low": 0},
        "marks": [{"y": 0.5, "label": "1/2"}],
        "series": series,
    }


def _tables(run: Run, first: list[str]) -> list[dict[str, Any]]:
    names = [
        *(name for name in first if name in run.tables),
        *(name for name in run.tables if name not in first),
    ]
    found = []
    for name in names:
        frame = run.table(name)
        shown = frame.head(MOST_ROWS)
        shown = shown[[column for column in shown.columns if not _holds_lists(shown[column])]]
        columns = described(run, name, map(str, shown.columns))
        found.append(
            {
                "name": name.replace("_", " "),
                "columns": columns,
                "rows": columns_of(shown),
                "count": len(frame),
            }
        )
    return found


def _holds_lists(column: Any) -> bool:
    """Whether cells are arrays, such as weights: they stay in the run."""
    return (
        len(column) > 0
        and hasattr(column.iloc[0], "__len__")
        and not isinstance(column.iloc[0], str)
    )


# ---- The page of a downstream run: readings against keys kept, errors layer by layer,
# predictions against what was measured.

COLORS = 8  # of the palette; more rules go round


def is_downstream(run: Run) -> bool:
    return run.manifest.job == "downstream"


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
