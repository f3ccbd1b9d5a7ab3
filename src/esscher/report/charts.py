"""Pages of charts and tables: of a sweep over laws, and of any job that has no page of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from esscher.report.words import (
    described_table,
    numbers,
    overview,
    read_table,
    shortened,
    theory_lines,
)
from esscher.runs import Run
from esscher.runs.columns import Column


def charts_page(
    run: Run, title: str, line: str, charts: list[dict[str, Any]], first: list[str]
) -> dict[str, Any]:
    """A page of charts with the run's tables below, those named first in front."""
    content = overview(run, "charts", title, [line])
    names = [name for name in first if name in run.tables]
    tables = [described_table(run, name) for name in dict.fromkeys([*names, *run.tables])]
    if not tables:
        content["warnings"].append("This run has no table yet, so there is nothing to show.")
    return content | {"charts": [chart for chart in charts if chart["series"]], "tables": tables}


def tables_page(run: Run) -> dict[str, Any]:
    """A plain page for a job that has no views of its own."""
    title = str(run.spec.get("title") or run.manifest.job)
    return charts_page(
        run, title, f"Run of {shortened(run.manifest.job)}, shown as tables.", [], []
    )


def sweep_charts(run: Run) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By kind of error that a sweep over laws measured: errors against n, exponents against the
    horizon.
    """
    rates, curves = read_table(run, "rates"), read_table(run, "curves")
    if rates is None:
        return {}
    over, columns = str((run.spec.get("sweep") or {}).get("over", "")), run.columns("rates")
    return {
        str(metric): (
            errors_chart(
                None if curves is None else curves[curves["metric"] == metric], metric, over
            ),
            exponents_chart(own, metric, columns),
        )
        for metric, own in rates.groupby("metric", sort=False)
    }


def sweep(run: Run) -> dict[str, Any]:
    """The page of a sweep over laws."""
    charts = [chart for pair in sweep_charts(run).values() for chart in pair]
    over = str((run.spec.get("sweep") or {}).get("over", ""))
    law = (run.spec.get("law") or {}).items()
    what = ", ".join(f"{key} {value}" for key, value in law if value not in (None, 0.0)) or "a law"
    line = (
        f"Attention on tokens of {shortened(what)}{f', swept over {over}' if over else ''}; error"
        " against the limit on infinitely many tokens."
    )
    return charts_page(
        run, str(run.spec.get("title") or "Sweep over laws"), line, charts, ["rates"]
    )


def errors_chart(curves: Any | None, metric: str, over: str) -> dict[str, Any]:
    series = []
    last = 1 if curves is None or curves.empty else max(1, int(curves["point"].max()))
    for (point, kind), part in () if curves is None else curves.groupby(["point", "kind"]):
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


def exponents_chart(
    rates: Any, metric: str, columns: Mapping[str, Column], against: str = "horizon2"
) -> dict[str, Any]:
    """Measured exponents with their intervals, and theory's lines, against a column."""
    rates = rates[rates["exponent"].notna()].sort_values(against)
    x = numbers(rates[against])
    series: list[dict[str, Any]] = []
    if len(rates):
        points = {"label": "measured", "mode": "points", "color": 0, "x": x}
        series.append(points | {"y": numbers(rates["exponent"])})
        series[0] |= {end: numbers(rates[end]) for end in ("low", "high") if end in rates}
    for line in theory_lines(columns):
        if rates[line["key"]].notna().any():
            series.append({**line, "x": x, "y": numbers(rates[line["key"]])})
    return {
        "title": f"Exponent of {metric} against the {against.removesuffix('2')}",
        "note": "The error falls as n to minus the exponent; 0.5 is the square-root law.",
        "x": {"label": columns[against].label, "log": True},
        "y": {"label": "exponent", "log": False, "low": 0},
        "marks": [{"y": 0.5, "label": "1/2"}],
        "series": series,
    }
