"""The content of pages other than a probe's: charts and tables, described as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from esscher.report.exponents import theory_lines
from esscher.report.packing import columns_of, numbers, shortened
from esscher.report.reading import described, overview, read_table, settings_line
from esscher.runs import Run
from esscher.runs.columns import Column

__all__ = ["MOST_ROWS", "charts_page", "sweep", "tables_page"]

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
