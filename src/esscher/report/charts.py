"""Pages of charts and tables: of a sweep over laws, and of any job that has no page of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def charts_page(
    run: Run, title: str, line: str, charts: list[dict[str, Any]], first: list[str]
) -> dict[str, Any]:
    """A page of charts with the run's tables below, those named first in front."""
    content = overview(run, "charts", title, [line, settings_line(run)])
    names = [name for name in first if name in run.tables]
    tables = [_table(run, name) for name in dict.fromkeys([*names, *run.tables])]
    if not tables:
        content["warnings"].append("This run has no table yet, so there is nothing to show.")
    return content | {"charts": [chart for chart in charts if chart["series"]], "tables": tables}


def tables_page(run: Run) -> dict[str, Any]:
    """A plain page for a job that has no views of its own."""
    title = str(run.spec.get("title") or run.manifest.job)
    return charts_page(
        run, title, f"Run of {shortened(run.manifest.job)}, shown as tables.", [], []
    )


def _table(run: Run, name: str) -> dict[str, Any]:
    """A table with its columns explained; cells that are arrays stay in the run."""
    frame = run.table(name)
    known = run.columns(name)
    shown = frame.head(MOST_ROWS)
    shown = shown[[key for key in shown.columns if known[str(key)].kind != "list"]]
    return {
        "name": name.replace("_", " "),
        "columns": described(run, name, map(str, shown.columns)),
        "rows": columns_of(shown),
        "count": len(frame),
    }


def sweep(run: Run) -> dict[str, Any]:
    """Errors against n and exponents against the horizon, for each kind of error that a sweep over
    laws measured.
    """
    charts = []
    rates, curves = read_table(run, "rates"), read_table(run, "curves")
    over = str((run.spec.get("sweep") or {}).get("over", ""))
    if rates is not None:
        for metric, own in rates.groupby("metric", sort=False):
            if curves is not None:
                charts.append(_errors(curves[curves["metric"] == metric], str(metric), over))
            charts.append(_exponents(own, str(metric), run.columns("rates")))
    law = (run.spec.get("law") or {}).items()
    what = ", ".join(f"{key} {value}" for key, value in law if value not in (None, 0.0)) or "a law"
    line = (
        f"Attention on tokens of {shortened(what)}{f', swept over {over}' if over else ''}; error"
        " against the limit on infinitely many tokens."
    )
    return charts_page(
        run, str(run.spec.get("title") or "Sweep over laws"), line, charts, ["rates"]
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
            entry["low"] = numbers(part["rms"] - 2 * part["stderr"])
            entry["high"] = numbers(part["rms"] + 2 * part["stderr"])
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
        ends = {"low": numbers(rates["low"]), "high": numbers(rates["high"])}
        points = {"label": "measured", "mode": "points", "color": 0}
        series.append({**points, "x": x, "y": numbers(rates["exponent"]), **ends})
    for line in theory_lines(columns):
        if rates[line.key].notna().any():
            style = {"label": line.label, "dash": line.dash, "color": line.color}
            series.append({**style, "x": x, "y": numbers(rates[line.key])})
    return {
        "title": f"Exponent of {metric} against the horizon",
        "note": "The error falls as n to minus the exponent; 0.5 is the square-root law.",
        "x": {"label": columns["horizon2"].label, "log": True},
        "y": {"label": "exponent", "log": False, "low": 0},
        "marks": [{"y": 0.5, "label": "1/2"}],
        "series": series,
    }
