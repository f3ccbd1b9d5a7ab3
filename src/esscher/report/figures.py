"""Figures with matplotlib: charts of the page as files sized for a paper, the error curve of a law
with what theory says of it, and the map of a probe's heads, on axes you give.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from esscher.report.charts import chart_of, exponents_chart
from esscher.report.page import PALETTE, SCALE, content_of
from esscher.report.words import dash_of, heads_of, need_column
from esscher.runs import Run
from esscher.runs.store import write_durable

if TYPE_CHECKING:  # so that figures of stored runs need no torch
    from esscher.errors.curve import ErrorCurve
    from esscher.theory.prediction import Prediction

FORMATS = ("svg", "pdf", "png")
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
HEADROOM = 100.0  # bounds further above the curve than this are left out of the picture
MAPS = ("beta_fit", "coupling", "effective_tokens")


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt  # chooses a backend, so only when nobody gave axes

    return plt.subplots(layout="constrained")[1]


# ---- A curve of a law.


def plot_error(curve: ErrorCurve, *, ax: Any = None) -> Any:
    """Root mean square error against n, log-log, with its 95 % quantile over queries and, if
    sampled, its standard error; returns the axes.
    """
    with matplotlib.rc_context(STYLE):
        return draw_chart(_error_chart(curve), ax=_axes(ax))


def _error_chart(curve: ErrorCurve) -> dict[str, Any]:
    own = {"label": curve.kind, "color": 0, "x": curve.n, "y": curve.rms}
    if curve.stderr.any():
        own |= {"low": curve.rms - 2 * curve.stderr, "high": curve.rms + 2 * curve.stderr}
    series = [own]
    if curve.q95 is not None:
        told = {"label": f"{curve.kind}, 95 % of queries", "dash": "dotted", "color": 0}
        series.append({**told, "x": curve.n, "y": curve.q95})
    return chart_of("", "tokens n", "rms error", series)


def prediction_charts(curve: ErrorCurve, found: Sequence[Prediction]) -> list[dict[str, Any]]:
    """The exact error with the bounds on it that apply and fall into the picture; and the local
    exponent -d log rms / d log n beside the constant exponents claimed for that error.

    Both are of the L2 mean square. Rates of moments ([B]), of uniform errors and of kept keys speak
    of other errors: the page of a sweep draws them over theirs.
    """
    error, held = _error_chart(curve), [p for p in found if p.applies]
    for p in held:
        if p.value is not None and p.quantity.startswith("l2"):
            height = p.rms(curve.n)
            height = np.where(height < HEADROOM * curve.rms.max(), height, np.nan)
            if np.isfinite(height).any():
                error["series"].append(_line(p, len(error["series"]), curve.n, height))
    series = []
    if curve.slope is not None:
        series.append({"label": "exact, local", "color": 0, "x": curve.n, "y": -curve.slope})
    for p in held:
        of_l2 = "l2" in p.quantity and "kept keys" not in p.quantity
        if p.value is None and p.exponent is not None and of_l2:
            series.append(_line(p, len(series), curve.n[[0, -1]], [p.exponent, p.exponent]))
    return [error, chart_of("", "tokens n", "exponent", series, log="x", low=0.0)]


def _line(p: Prediction, place: int, x: Any, y: Any) -> dict[str, Any]:
    style = {"dash": dash_of(p.status), "color": 1 + place % (len(PALETTE) - 1)}
    return {"label": f"{p.name} ({p.status})", **style, "x": x, "y": y}


# ---- Charts of the page, as figures.


def draw_chart(chart: dict[str, Any], *, ax: Any) -> Any:
    """Draw a chart of the page: lines, points with their intervals, a legend beside them."""
    for name in ("x", "y"):
        scale = "log" if chart[name]["log"] else "linear"
        ax.set(**{f"{name}label": chart[name]["label"], f"{name}scale": scale})
    for entry in chart["series"]:
        known = {
            key: np.array(entry[key], float) for key in ("x", "y", "low", "high") if key in entry
        }
        x, y = known["x"], known["y"]
        color: Any = PALETTE[entry.get("color", 0)]
        if "shade" in entry:
            color = matplotlib.colormaps[SCALE](entry["shade"])
        # names come from outside: no mathematics is read in them
        label = "_" if entry.get("unlisted") else entry["label"].replace("$", r"\$")
        style: dict[str, Any] = {"color": color, "lw": 0.8, "label": label}
        if entry.get("mode") == "points":
            ends = np.abs([known["low"] - y, known["high"] - y]) if "low" in known else None
            ax.errorbar(x, y, yerr=ends, fmt="o", ms=2.5, **style)
        else:
            ax.plot(x, y, ls=entry.get("dash", "solid"), **style)
            if "low" in known:
                ax.fill_between(x, known["low"], known["high"], color=color, alpha=0.2, lw=0)
    for mark in chart.get("marks", ()):
        ax.axhline(mark["y"], color=PALETTE[6], lw=0.8, ls=":")
    if ax.get_ylim()[0] > chart["y"].get("low", math.inf):
        ax.set_ylim(bottom=chart["y"]["low"])
    ax.xaxis.set_major_formatter("{x:g}")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))  # hides no point
    return ax


def save_charts(charts: Sequence[dict[str, Any]], path: Path, title: str = "") -> None:
    """Charts below each other as a figure file, each with its title and note."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDE, 2.9 * len(charts)), layout="constrained")
        for ax, chart in zip(np.ravel(figure.subplots(len(charts))), charts, strict=True):
            draw_chart(chart, ax=ax)
            told = "\n".join(filter(None, (chart["title"], chart["note"])))
            ax.set_title(told, fontsize=7, wrap=True, parse_math=False)
        figure.suptitle(title)
        save_figure(figure, path)


def save_figures(run: Run, formats: Sequence[str], folder: Path) -> list[Path]:
    """Write the charts of a run's page in every format, one file each, and return the files; of a
    probe its predicted losses, exponents against the horizon, and maps of heads.
    """
    content, written = content_of(run), []
    heads: Any = heads_of(run)
    charts = list(content.get("charts", ()))
    if content.get("losses"):
        charts.append(content["losses"])
    if heads is not None and {"horizon2", "beta_fit"} <= set(heads.columns):
        names = {"beta_fit": "exponent", "beta_low": "low", "beta_high": "high"}
        measured = heads[(heads["status"] == "ok") & heads["horizon2"].gt(0)].rename(columns=names)
        charts.append(exponents_chart(measured, "l2", run.columns("heads")))
    for chart in charts:
        name = re.sub(r"[^a-z0-9]+", "_", chart["title"].lower()).strip("_")
        for kind in formats:
            written.append(folder / f"{name}.{kind}")
            save_charts([chart], written[-1])
    for column in () if heads is None else (need_column(heads, "10"), *MAPS):
        if column not in heads or heads.loc[heads["status"] == "ok", column].isna().all():
            continue
        with matplotlib.rc_context(STYLE):
            figure = Figure((COLUMN, 0.9 + 0.16 * heads["layer"].nunique()), layout="constrained")
            plot_map(run, column, ax=figure.subplots())
            for kind in formats:
                written.append(folder / f"map_{column}.{kind}")
                save_figure(figure, written[-1])
    return written


def check_format(path: Path) -> str:
    """The format a figure's name asks for."""
    kind = path.suffix.removeprefix(".")
    if kind not in FORMATS:
        raise ValueError(
            f"figure: expected a file name ending in .{', .'.join(FORMATS)}, got {path.name!r}"
        )
    return kind


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format its name ends with."""
    kind = check_format(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = io.BytesIO()
    figure.savefig(data, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else None)
    # takes the place of a link; what the link points to stays as it is
    write_durable(path, data.getvalue())


# ---- Heads of a probe.


def plot_map(run: Run, column: str = "tokens_needed_10pct", *, ax: Any = None) -> Any:
    """Layers down, heads across, coloured by a column of numbers of the heads table; grey where a
    head was not measured or never reached an error. Returns the axes.
    """
    heads = heads_of(run)
    if heads is None:
        raise ValueError(
            f"{run.path}: expected a run with heads, such as one of esscher probe; it has none"
        )
    known = list(heads.select_dtypes("number").columns)
    if column not in known:
        raise ValueError(f"column: expected one of {', '.join(known)}, got {column!r}")
    ax, what = _axes(ax), run.columns("heads")[column]
    ax.grid(False)
    ax.set_facecolor("0.85")
    values = heads[column].where(heads["status"] == "ok").astype(float)
    grid = heads.assign(value=values).pivot(index="layer", columns="head", values="value")
    log = what.scale == "log" and float(grid.min(axis=None)) > 0
    image = ax.imshow(grid, cmap=SCALE, norm=LogNorm() if log else None, aspect="auto")
    if grid.notna().any(axis=None):
        ax.figure.colorbar(image, ax=ax)
    ax.set(xlabel="head", ylabel="layer", title=what.label)
    for axis, names in ((ax.xaxis, grid.columns), (ax.yaxis, grid.index)):
        step = -(-len(names) // 16)
        axis.set_ticks(range(0, len(names), step), [str(name) for name in names[::step]])
    return ax
