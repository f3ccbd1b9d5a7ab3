"""Figures with matplotlib: error curves of laws with what theory says of them, and those of stored
runs, on axes you give or as files sized for the column of a paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure

from esscher.report.charts import exponents_chart, sweep_charts
from esscher.report.style import (
    COLUMN,
    PALETTE,
    SCALE,
    STYLE,
    WIDE,
    WORDS,
    beside,
    save_figure,
    say,
)
from esscher.report.words import (
    dash_of,
    epsilons_of,
    heads_of,
    need_column,
    ranked_heads,
    read_table,
    theory_lines,
)
from esscher.runs import Run

if TYPE_CHECKING:  # so that figures of stored runs need no torch
    from esscher.errors.curve import ErrorCurve
    from esscher.theory.prediction import Prediction

HEADROOM = 100.0  # bounds further above the curve than this are left out of the picture
MAPS = ("beta_fit", "coupling", "effective_tokens", "regime", "kind")


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt  # chooses a backend, so only when nobody gave axes

    return plt.subplots(layout="constrained")[1]


# ---- A curve of a law.


def plot_error(curve: ErrorCurve, *, ax: Any = None, label: str | None = None) -> Any:
    """Root mean square error against n, log-log, with its 95 % quantile over queries and, if
    sampled, its standard error; returns the axes.
    """
    with matplotlib.rc_context(STYLE):
        ax, color, label = _axes(ax), PALETTE[0], label or curve.kind
        ax.plot(curve.n, curve.rms, color=color, label=label, lw=1.6)
        if curve.q95 is not None:
            style: dict[str, Any] = {"color": color, "lw": 0.8, "ls": ":"}
            ax.plot(curve.n, curve.q95, label=f"{label}, 95 % of queries", **style)
        if curve.stderr.any():
            ax.errorbar(curve.n, curve.rms, yerr=2 * curve.stderr, fmt="none", ecolor=color, lw=0.8)
        ax.set(xscale="log", yscale="log", xlabel="tokens n", ylabel="rms error")
        ax.legend()
    return ax


def plot_bounds(ax: Any, curve: ErrorCurve, found: Sequence[Prediction]) -> None:
    """Values that speak of the plotted error, the L2 mean square, where they fall into the
    picture.
    """
    positive = curve.rms[curve.rms > 0]
    low, high = float(positive.min()), float(positive.max())
    if curve.delta is not None and np.isfinite(curve.delta):
        delta = np.sqrt(curve.delta / curve.n)
        ax.plot(curve.n, delta, color=PALETTE[6], lw=1.0, ls="-.", label="delta method")
    top = high if curve.q95 is None else max(high, float(np.nanmax(curve.q95)))
    drawn = 0
    for p in found:
        if p.value is None or not p.applies or not p.quantity.startswith("l2"):
            continue
        height = p.rms(curve.n)
        visible = np.isfinite(height) & (height < HEADROOM * high)
        if visible.any():
            ax.plot(curve.n[visible], height[visible], **_style(p, drawn))
            drawn, top = drawn + 1, max(top, float(height[visible].max()))
    ax.set_ylim(low / 2, min(2 * top, HEADROOM * high))


def plot_exponents(ax: Any, curve: ErrorCurve, found: Sequence[Prediction]) -> None:
    """The local exponent -d log rms / d log n, and the constant exponents claimed for that error,
    the L2 mean square.

    Rates of moments ([B]), of uniform errors and of kept keys speak of other errors: ``save_rates``
    draws them over theirs.
    """
    if curve.slope is not None:
        ax.plot(curve.n, -curve.slope, color=PALETTE[0], lw=1.6, label="exact, local")
    own = [p for p in found if "l2" in p.quantity and "kept keys" not in p.quantity]
    rates = [p for p in own if p.value is None and p.exponent is not None and p.applies]
    for i, prediction in enumerate(rates):
        ax.axhline(prediction.exponent, **_style(prediction, i))
    ax.set(xscale="log", xlabel="tokens n", ylabel="exponent", ylim=(0.0, None))


def _style(p: Prediction, i: int) -> dict[str, Any]:
    color = PALETTE[1 + i % (len(PALETTE) - 1)]
    return {"color": color, "lw": 1.0, "ls": dash_of(p.status), "label": f"{p.name} ({p.status})"}


def save_predictions(curve: ErrorCurve, found: Sequence[Prediction], path: Path) -> None:
    """Exact error with every bound on it that applies, and below the local exponent beside the
    rates' exponents.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.0, 5.6), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        plot_error(curve, ax=top, label="exact")
        plot_bounds(top, curve, found)
        top.set(xlabel="")
        plot_exponents(bottom, curve, found)
        for ax in (top, bottom):
            beside(ax)
        save_figure(figure, path)


# ---- Charts of the page, as figures.


def draw_chart(chart: dict[str, Any], *, ax: Any) -> Any:
    """Draw a chart of the page: lines, points with their intervals, a legend beside them."""
    for name in ("x", "y"):
        scale = "log" if chart[name]["log"] else "linear"
        ax.set(**{f"{name}label": chart[name]["label"], f"{name}scale": scale})
    if not chart["series"]:
        return say(ax, "nothing was measured")
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
    beside(ax)
    return ax


def save_rates(run: Run, title: str, path: Path) -> None:
    """The charts of a sweep in one figure, a row for each kind of error."""
    charts = sweep_charts(run)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.0, 2.6 * len(charts) + 0.4), layout="constrained")
        for row, pair in zip(
            figure.subplots(len(charts), 2, squeeze=False), charts.values(), strict=True
        ):
            for ax, chart in zip(row, pair, strict=True):
                draw_chart(chart, ax=ax)
        figure.suptitle(title)
        save_figure(figure, path)


# ---- Heads of a probe.


def plot_curve(run: Run, layer: int, head: int, *, ax: Any = None) -> Any:
    """Error of one head against n, log-log, with Monte Carlo where measured, rates through the
    first point and the delta method; the view stays on the exact curve.
    """
    heads = _heads(run)
    rows = heads[(heads["layer"] == layer) & (heads["head"] == head)]
    if rows.empty:
        raise ValueError(
            f"layer, head: expected layers {heads['layer'].min()} to {heads['layer'].max()} and"
            f" heads {heads['head'].min()} to {heads['head'].max()} of this run, got layer {layer},"
            f" head {head}"
        )
    row, ax, curves = rows.iloc[0].to_dict(), _axes(ax), read_table(run, "curves")
    ax.set_title(f"layer {layer}, head {head}")
    if curves is None or row["status"] != "ok":
        return say(ax, str(row.get("reason") or "no curve was stored"))
    own = curves[(curves["layer"] == layer) & (curves["head"] == head)].sort_values("n")
    metrics = run.columns("curves")["metric"]
    labels = dict(zip(metrics.words, metrics.meanings, strict=False))
    series: list[dict[str, Any]] = []
    view = (None, None)
    for i, ((metric, kind), part) in enumerate(own[own["rms"] > 0].groupby(["metric", "kind"])):
        n, rms, color = part["n"].to_numpy(float), part["rms"].to_numpy(float), i % 6
        entry = {"label": labels.get(metric, str(metric)), "color": color, "x": n, "y": rms}
        if kind == "montecarlo":
            ends = {"low": rms - 2 * part["stderr"], "high": rms + 2 * part["stderr"]}
            entry |= {"mode": "points", **ends}
        series.append(entry)
        if metric == "l2":
            view = (rms.min() / 2, rms.max() * 4)
            told = {"label": "95 % of queries below", "dash": "dotted", "color": color}
            series.append({**told, "x": n, "y": part["q95"]})
            for line in theory_lines(run.columns("heads")):
                falling = rms[0] * (n / n[0]) ** -row.get(line["key"], math.nan)
                series.append({**line, "x": n, "y": falling})
            delta = row.get("delta_constant", math.nan) / np.sqrt(n)
            series.append(
                {"label": "delta method", "dash": "dashdot", "color": 7, "x": n, "y": delta}
            )
    axes = {"x": {"label": "tokens n", "log": True}, "y": {"label": "rms error", "log": True}}
    drawn = [entry for entry in series if np.isfinite(entry["y"]).any()]
    draw_chart({**axes, "series": drawn}, ax=ax)
    ax.set_ylim(*view)
    return ax


def plot_map(run: Run, column: str = "tokens_needed_10pct", *, ax: Any = None) -> Any:
    """Layers down, heads across, coloured by a column of the heads table."""
    heads = _heads(run)
    if column not in heads.columns:
        raise ValueError(f"column: expected one of {', '.join(heads.columns)}, got {column!r}")
    ax = _axes(ax)
    layers, across = sorted(set(heads["layer"])), sorted(set(heads["head"]))
    what, values = run.columns("heads")[column], heads[column].where(heads["status"] == "ok")
    words: dict[str, int] = {}
    if what.kind == "word":  # those that the column names first, each with its place in the palette
        seen = {value for value in values if isinstance(value, str) and value}
        order = enumerate([*what.words, *sorted(seen - set(what.words))])
        words = {word: WORDS[min(i, len(WORDS) - 1)] for i, word in order if word in seen}
        values = values.map(words)
    grid = np.full((len(layers), len(across)), np.nan)
    for layer, head, value in zip(heads["layer"], heads["head"], values, strict=True):
        grid[layers.index(layer), across.index(head)] = value
    ax.grid(False)
    ax.set_facecolor("0.85")  # what was never reached or not measured
    usable = grid[np.isfinite(grid)]
    if words:
        colors = ListedColormap(PALETTE)
        ax.imshow(grid, cmap=colors, vmin=-0.5, vmax=len(PALETTE) - 0.5, aspect="auto")
        for word, color in words.items():
            ax.plot([], [], "s", color=PALETTE[color], label=word)
        beside(ax)
    else:
        log = what.scale == "log" and usable.size > 0 and usable.min() > 0
        norm = LogNorm(usable.min(), max(usable.max(), usable.min() * 1.01)) if log else None
        image = ax.imshow(grid, cmap=SCALE, norm=norm, aspect="auto")
        if usable.size:
            ax.figure.colorbar(image, ax=ax)
    gaps = "" if usable.size == grid.size else " (grey: not reached or not measured)"
    ax.set(xlabel=f"head{gaps}", ylabel="layer", title=what.label)
    for axis, names in ((ax.xaxis, across), (ax.yaxis, layers)):
        step = -(-len(names) // 16)
        axis.set_ticks(range(0, len(names), step), [str(name) for name in names[::step]])
    return ax


def plot_rates(run: Run, against: str = "horizon2", *, ax: Any = None) -> Any:
    """Measured exponents of the heads against horizon2, horizon or coupling, with what theory says
    as a function of it.
    """
    heads, columns = _heads(run), run.columns("heads")
    if against not in ("horizon2", "horizon", "coupling"):
        raise ValueError(f"against: expected horizon2, horizon or coupling, got {against!r}")
    columns = {key: column for key, column in columns.items() if column.of in ("", against)}
    heads = heads[(heads["status"] == "ok") & heads[against].gt(0)]
    names = {"beta_fit": "exponent", "beta_low": "low", "beta_high": "high"}
    chart = exponents_chart(heads.rename(columns=names), "l2", columns, against)
    return draw_chart(chart, ax=_axes(ax))


def save_figures(run: Run, formats: Sequence[str], folder: Path) -> list[Path]:
    """Write every figure of a probe in every format, one file each, and return the files: maps,
    exponents, and the curves of the least and the most demanding head.
    """
    heads = _heads(run)
    tall, need = 0.9 + 0.16 * heads["layer"].nunique(), need_column(heads, "10")
    plans: dict[str, tuple[tuple[float, float], Callable[..., Any]]] = {
        f"map_{column}": ((COLUMN, tall), partial(plot_map, run, column))
        for column in dict.fromkeys([*epsilons_of(heads).values(), need, *MAPS])
        if column in heads.columns
    }
    for against in ("horizon2", "coupling"):
        if {against, "beta_fit"} <= set(heads.columns):
            plans[f"exponents_{against}"] = ((WIDE * 0.7, 2.8), partial(plot_rates, run, against))
    order = ranked_heads(heads, need if need in heads.columns else "beta_fit")
    for name, rows in (("least", order[:1]), ("most", order[-1:])):
        for layer, head in zip(rows["layer"].map(int), rows["head"].map(int), strict=True):
            draw = partial(plot_curve, run, layer, head)
            plans[f"curve_{name}_demanding_L{layer}H{head}"] = ((WIDE * 0.7, 3.4), draw)
    written = []
    for name, (size, plot) in plans.items():
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=size, layout="constrained")
            plot(ax=figure.subplots())
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # laid out once for all formats
            for kind in formats:
                path = folder / f"{name}.{kind}"
                save_figure(figure, path)
                written.append(path)
    return written


def _heads(run: Run) -> Any:
    heads = heads_of(run)
    if heads is None:
        raise ValueError(
            f"{run.path}: expected a run with heads, such as one of esscher probe; it has none"
        )
    return heads
