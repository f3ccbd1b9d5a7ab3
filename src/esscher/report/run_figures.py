"""Figures of a stored run with matplotlib: on axes you give, or as files sized for the column of a
paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from esscher.report.figures import errors_panel, exponents_panel
from esscher.report.probe import epsilons_of, heads_of, is_atlas
from esscher.report.style import (
    COLUMN,
    FORMATS,
    PALETTE,
    SCALE,
    STYLE,
    WIDE,
    WORDS,
    save_figure,
    say,
)
from esscher.report.words import need_column, ranked_heads, read_table, theory_lines
from esscher.runs import Run
from esscher.runs.columns import Column

WRITTEN = 150  # cells of a map that still hold their value as text
MAPS = "beta_fit coupling effective_tokens tokens_exponent khat sink_mass regime kind"
Plans = dict[str, tuple[tuple[float, float], Callable[..., Any]]]


def plot_curve(run: Run, layer: int, head: int, *, ax: Any = None) -> Any:
    """Error of one head against n, log-log, with Monte Carlo where measured, rates, delta method
    and freezing point.
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
    ax.set(xscale="log", yscale="log", xlabel="tokens n", ylabel="rms error")
    ax.set_title(f"layer {layer}, head {head}")
    if curves is None or row["status"] != "ok":
        return say(ax, str(row.get("reason") or "no curve was stored"))
    own = curves[(curves["layer"] == layer) & (curves["head"] == head)].sort_values("n")
    metrics = run.columns("curves")["metric"]
    labels = dict(zip(metrics.words, metrics.meanings, strict=False))
    for i, ((metric, kind), part) in enumerate(own.groupby(["metric", "kind"], sort=False)):
        style = {"color": PALETTE[i % 6], "label": labels.get(metric, str(metric))}
        if kind == "montecarlo":
            ends = 2 * part["stderr"]
            ax.errorbar(part["n"], part["rms"], yerr=ends, fmt="o", ms=3, lw=0.8, **style)
            continue
        part = part[part["rms"] > 0]
        ax.plot(part["n"], part["rms"], lw=1.5, **style)
        if metric == "l2":
            style["label"] = "95 % of queries below"
            ax.plot(part["n"], part["q95"], lw=0.8, ls=":", **style)
            _draw_theory(ax, run, row, part)
    ax.legend()
    return ax


def _draw_theory(ax: Any, run: Run, row: Any, exact: Any) -> None:
    """Rates through the first point, the delta method with its own constant; the view stays on the
    exact curve.
    """
    n, rms = exact["n"].to_numpy(float), exact["rms"].to_numpy(float)
    low, high = rms.min() / 2, rms.max() * 4
    for line in theory_lines(run.columns("heads")):
        if math.isfinite(row.get(line.key, math.nan)):
            style = {"color": PALETTE[line.color], "ls": line.dash, "lw": 1.0}
            ax.plot(n, rms[0] * (n / n[0]) ** -row[line.key], label=line.label, **style)
    constant, freezing = (row.get(key, math.nan) for key in ("delta_constant", "freezing_tokens"))
    if math.isfinite(constant):
        style = {"color": PALETTE[7], "ls": "-.", "lw": 0.8}
        ax.plot(n, constant / np.sqrt(n), label="delta method", **style)
    if n[0] <= freezing <= n[-1]:
        ax.axvline(freezing, color=PALETTE[6], lw=0.8, ls=":")
        ax.text(freezing, high, " freezing", fontsize=6, va="top")
    ax.set_ylim(low, high)


def plot_map(run: Run, column: str = "tokens_needed_10pct", *, ax: Any = None) -> Any:
    """Layers down, heads across, coloured by a column of the heads table."""
    heads = _heads(run)
    if column not in heads.columns:
        raise ValueError(f"column: expected one of {', '.join(heads.columns)}, got {column!r}")
    ax = _axes(ax)
    layers, across = sorted(set(heads["layer"])), sorted(set(heads["head"]))
    what, values = run.columns("heads")[column], heads[column].where(heads["status"] == "ok")
    words = _colours(what, values) if what.kind == "word" else {}
    grid = np.full((len(layers), len(across)), np.nan)
    drawn = values.map(words) if words else values
    for layer, head, value in zip(heads["layer"], heads["head"], drawn, strict=True):
        grid[layers.index(layer), across.index(head)] = value
    ax.grid(False)
    ax.set_facecolor("0.85")  # what was never reached or not measured
    if words:
        colors = ListedColormap(PALETTE)
        ax.imshow(grid, cmap=colors, vmin=-0.5, vmax=len(PALETTE) - 0.5, aspect="auto")
        for word, color in words.items():
            ax.plot([], [], "s", color=PALETTE[color], label=word)
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    else:
        _draw_numbers(ax, grid, what.scale == "log")
    gaps = "" if np.isfinite(grid).all() else " (grey: not reached or not measured)"
    ax.set(xlabel=f"head{gaps}", ylabel="layer", title=what.label)
    for axis, names in ((ax.xaxis, across), (ax.yaxis, layers)):
        step = -(-len(names) // 16)
        axis.set_ticks(range(0, len(names), step), [str(name) for name in names[::step]])
    return ax


def _colours(column: Column, values: Any) -> dict[str, int]:
    """The words that are there, those the column names first, and the place of each in the
    palette.
    """
    seen = {value for value in values if isinstance(value, str) and value}
    order = [*column.words, *sorted(seen - set(column.words))]
    places = {word: WORDS[min(i, len(WORDS) - 1)] for i, word in enumerate(order)}
    return {word: place for word, place in places.items() if word in seen}


def _draw_numbers(ax: Any, grid: Any, log: bool) -> None:
    """A map on a scale of colours; of few cells also as text."""
    usable = grid[np.isfinite(grid)]
    logarithmic = log and usable.size > 0 and usable.min() > 0
    norm = LogNorm(usable.min(), max(usable.max(), usable.min() * 1.01)) if logarithmic else None
    image = ax.imshow(grid, cmap=SCALE, norm=norm, aspect="auto")
    if usable.size:
        ax.figure.colorbar(image, ax=ax)
    for (i, j), value in np.ndenumerate(grid) if grid.size <= WRITTEN else ():
        if np.isfinite(value):
            color = "black" if float(image.norm(value)) > 0.55 else "white"
            ax.text(j, i, _brief(value), ha="center", va="center", fontsize=5, color=color)


def plot_rates(
    run: Run, against: str = "horizon2", *, metric: str | None = None, ax: Any = None
) -> Any:
    """Measured exponents against horizon2, horizon or coupling with what theory says; of a sweep,
    for one of its errors.
    """
    if not is_atlas(run):
        rates = read_table(run, "rates")
        if rates is None:
            raise ValueError(
                f"{run.path}: expected a run with rates or heads, got one with"
                f" {', '.join(run.tables) or 'nothing'}"
            )
        own = rates[rates["metric"] == (metric or rates["metric"].iloc[0])]
        ax = _axes(ax)
        exponents_panel(ax, own, theory_lines(run.columns("rates")))
        return ax
    heads, columns = _heads(run), run.columns("heads")
    if against not in ("horizon2", "horizon", "coupling"):
        raise ValueError(f"against: expected horizon2, horizon or coupling, got {against!r}")
    ax = _axes(ax)
    ax.set(xscale="log", xlabel=columns[against].label, ylabel="exponent", ylim=(0.0, 0.6))
    ax.axhline(0.5, color=PALETTE[6], lw=0.8, ls=":")
    heads = heads[(heads["status"] == "ok") & heads[against].gt(0)].sort_values(against)
    if heads.empty:
        return say(ax, "no head was measured")
    x, y = heads[against].to_numpy(float), heads["beta_fit"].to_numpy(float)
    if {"beta_low", "beta_high"} <= set(heads.columns):
        ends = np.clip([y - heads["beta_low"], heads["beta_high"] - y], 0.0, None)
        ax.errorbar(x, y, yerr=ends, fmt="none", ecolor="0.7", lw=0.6)
    points = {"cmap": SCALE, "s": 9, "zorder": 3, "label": "a head (dark: early layer)"}
    ax.scatter(x, y, c=heads["layer"], **points)
    for line in theory_lines(columns):
        style: dict[str, Any] = {"ls": "", "marker": "_", "ms": 3}
        if line.of == against:
            style = {"ls": line.dash, "lw": 1.0}
        ax.plot(x, heads[line.key], color=PALETTE[line.color], label=line.label, **style)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.legend()
    return ax


def save_figures(run: Run, formats: Sequence[str], folder: Path) -> list[Path]:
    """Write every figure of a run in every format, one file each, and return the files."""
    if not formats or any(kind not in FORMATS for kind in formats):
        raise ValueError(
            f"figures: expected some of {', '.join(FORMATS)}, got {', '.join(formats) or 'nothing'}"
        )
    written = []
    for name, (size, draw) in _plans(run).items():
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=size, layout="constrained")
            draw(ax=figure.subplots())
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # laid out once for all formats
            for kind in formats:
                path = folder / f"{name}.{kind}"
                save_figure(figure, path)
                written.append(path)
    return written


def _plans(run: Run) -> Plans:
    """Name of each figure -> its size in inches and what draws it."""
    if is_atlas(run):
        return _atlas_plans(run)
    rates, curves = read_table(run, "rates"), read_table(run, "curves")
    if rates is None:
        raise ValueError(
            f"{run.path}: there are no figures for a run of {run.manifest.job} without a table of"
            " rates"
        )
    over = str((run.spec.get("sweep") or {}).get("over", ""))
    plans: Plans = {}
    for metric in dict.fromkeys(rates["metric"]):
        part = None if curves is None else curves[curves["metric"] == metric]
        draw = partial(errors_panel, curves=part, metric=metric, over=over)
        plans[f"error_{metric}"] = ((COLUMN, 2.6), draw)
        plans[f"exponent_{metric}"] = ((COLUMN, 2.6), partial(plot_rates, run, metric=metric))
    return plans


def _atlas_plans(run: Run) -> Plans:
    """Maps, exponents, and the curves of the least and the most demanding head."""
    heads = _heads(run)
    tall, need = 0.9 + 0.16 * heads["layer"].nunique(), need_column(heads, "10")
    plans: Plans = {
        f"map_{column}": ((COLUMN, tall), partial(plot_map, run, column))
        for column in dict.fromkeys([*epsilons_of(heads).values(), need, *MAPS.split()])
        if column in heads.columns
    }
    if not (heads["status"] == "ok").any():
        return plans
    for against in ("horizon2", "coupling"):
        if {against, "beta_fit"} <= set(heads.columns):
            plans[f"exponents_{against}"] = ((COLUMN, 2.8), partial(plot_rates, run, against))
    order = ranked_heads(heads, need if need in heads.columns else "beta_fit")
    for name, rows in (("least", order[:1]), ("most", order[-1:])):
        for layer, head in zip(rows["layer"], rows["head"], strict=True):
            draw = partial(plot_curve, run, int(layer), int(head))
            plans[f"curve_{name}_demanding_L{layer}H{head}"] = ((WIDE * 0.7, 3.4), draw)
    return plans


def _heads(run: Run) -> Any:
    heads = heads_of(run)
    if heads is None:
        raise ValueError(
            f"{run.path}: expected a run with heads, such as one of esscher probe; it has none"
        )
    return heads


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt  # chooses a backend, so only when nobody gave axes

    return plt.subplots(layout="constrained")[1]


def _brief(value: float) -> str:
    """Four characters or so."""
    if value >= 1e6:
        return f"{value / 1e6:.2g}M" if value < 1e8 else f"{value:.0e}"
    if value >= 1e3:
        return f"{value / 1e3:.0f}k" if value >= 1e4 else f"{value / 1e3:.1f}k"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}".removeprefix("0")
