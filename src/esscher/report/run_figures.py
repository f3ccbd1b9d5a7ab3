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
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from esscher.report.figures import errors_panel, exponents_panel
from esscher.report.formats import FORMATS
from esscher.report.probe import draw_dispersion, draw_scales, epsilons_of, heads_of, is_atlas
from esscher.report.style import COLUMN, PALETTE, SCALE, STYLE, WIDE, WORDS, save_figure
from esscher.report.words import TheoryLine, need_column, ranked_heads, read_table, theory_lines
from esscher.runs import Run
from esscher.runs.columns import Column

WRITTEN = 150  # cells of a map that still hold their value as text


def plot_curve(run: Run, layer: int, head: int, *, ax: Any = None) -> Any:
    """Error of one head against n, log-log, with Monte Carlo where measured, rates, delta method
    and freezing point.
    """
    row = _row(run, layer, head)
    ax = _axes(ax)
    curves = read_table(run, "curves")
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="tokens n",
        ylabel="rms error",
        title=f"layer {layer}, head {head}",
    )
    if curves is None or row["status"] != "ok":
        return _say(ax, str(row.get("reason") or "no curve was stored"))
    own = curves[(curves["layer"] == layer) & (curves["head"] == head)]
    metrics = run.columns("curves")["metric"]
    labels = dict(zip(metrics.words, metrics.meanings, strict=False))
    for i, ((metric, kind), part) in enumerate(own.groupby(["metric", "kind"], sort=False)):
        part, color, label = part.sort_values("n"), PALETTE[i % 6], labels.get(metric, str(metric))
        if kind == "montecarlo":
            ax.errorbar(
                part["n"],
                part["rms"],
                yerr=2 * part["stderr"],
                fmt="o",
                ms=3,
                lw=0.8,
                color=color,
                label=label,
            )
            continue
        part = part[part["rms"] > 0]
        ax.plot(part["n"], part["rms"], color=color, lw=1.5, label=label)
        if metric == "l2":
            ax.plot(
                part["n"], part["q95"], color=color, lw=0.8, ls=":", label="95 % of queries below"
            )
            _theory_lines(ax, theory_lines(run.columns("heads")), row, part)
    ax.legend()
    return ax


def _theory_lines(ax: Any, lines: Sequence[TheoryLine], row: Any, exact: Any) -> None:
    """Rates through the first point, the delta method with its own constant; the view stays on the
    exact curve.
    """
    n, rms = exact["n"].to_numpy(float), exact["rms"].to_numpy(float)
    low, high = rms.min() / 2, rms.max() * 4
    for line in lines:
        if math.isfinite(row.get(line.key, math.nan)):
            style = {"color": PALETTE[line.color], "ls": line.dash, "lw": 1.0}
            ax.plot(n, rms[0] * (n / n[0]) ** -row[line.key], label=line.label, **style)
    if math.isfinite(row.get("delta_constant", math.nan)):
        ax.plot(
            n,
            row["delta_constant"] / np.sqrt(n),
            color=PALETTE[7],
            ls="-.",
            lw=0.8,
            label="delta method",
        )
    freezing = row.get("freezing_tokens", math.nan)
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
    good = heads["status"] == "ok"
    what, values = run.columns("heads")[column], heads[column].where(good)
    words = _colours(what, values) if what.kind == "word" else {}
    if words:
        values = values.map(words)
    grid = np.full((len(layers), len(across)), np.nan)
    for layer, head, value in zip(heads["layer"], heads["head"], values, strict=True):
        grid[layers.index(layer), across.index(head)] = value
    _draw_map(ax, grid, words, what.scale == "log")
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
    return {
        word: WORDS[min(place, len(WORDS) - 1)] for place, word in enumerate(order) if word in seen
    }


def _draw_map(ax: Any, grid: Any, words: dict[str, int], log: bool) -> None:
    """Numbers on a scale, or the colours of words."""
    ax.grid(False)
    ax.set_facecolor("0.85")  # what was never reached or not measured
    usable = grid[np.isfinite(grid)]
    if words:
        colors = matplotlib.colors.ListedColormap(PALETTE)
        ax.imshow(grid, cmap=colors, vmin=-0.5, vmax=len(PALETTE) - 0.5, aspect="auto")
        for word, color in words.items():
            ax.plot([], [], "s", color=PALETTE[color], label=word)
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return
    logarithmic = log and usable.size > 0 and usable.min() > 0
    norm = LogNorm(usable.min(), max(usable.max(), usable.min() * 1.01)) if logarithmic else None
    image = ax.imshow(grid, cmap=SCALE, norm=norm, aspect="auto")
    if usable.size:
        ax.figure.colorbar(image, ax=ax)
    if grid.size <= WRITTEN:
        for (i, j), value in np.ndenumerate(grid):
            if np.isfinite(value):
                bright = float(image.norm(value)) > 0.55
                ax.text(
                    j,
                    i,
                    _brief(value),
                    ha="center",
                    va="center",
                    fontsize=5,
                    color="black" if bright else "white",
                )


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
        chosen = metric if metric is not None else rates["metric"].iloc[0]
        ax = _axes(ax)
        exponents_panel(ax, rates[rates["metric"] == chosen], theory_lines(run.columns("rates")))
        return ax
    heads = _heads(run)
    if against not in ("horizon2", "horizon", "coupling"):
        raise ValueError(f"against: expected horizon2, horizon or coupling, got {against!r}")
    ax = _axes(ax)
    ax.set(
        xscale="log", xlabel=run.columns("heads")[against].label, ylabel="exponent", ylim=(0.0, 0.6)
    )
    ax.axhline(0.5, color=PALETTE[6], lw=0.8, ls=":")
    heads = heads[(heads["status"] == "ok") & heads[against].gt(0)].sort_values(against)
    if heads.empty:
        return _say(ax, "no head was measured")
    x, y = heads[against].to_numpy(float), heads["beta_fit"].to_numpy(float)
    if {"beta_low", "beta_high"} <= set(heads.columns):
        ends = np.clip([y - heads["beta_low"], heads["beta_high"] - y], 0.0, None)
        ax.errorbar(x, y, yerr=ends, fmt="none", ecolor="0.7", lw=0.6)
    ax.scatter(
        x, y, c=heads["layer"], cmap=SCALE, s=9, zorder=3, label="a head (dark: early layer)"
    )
    for line in theory_lines(run.columns("heads")):
        style = (
            {"ls": line.dash, "lw": 1.0}
            if line.of == against
            else {"ls": "", "marker": "_", "ms": 3}
        )
        ax.plot(x, heads[line.key], color=PALETTE[line.color], label=line.label, **style)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.legend()
    return ax


def plot_layers(run: Run, column: str = "tokens_needed_10pct", *, ax: Any = None) -> Any:
    """A column of the heads table over depth: a dot per head, a line through the median of each
    layer.
    """
    heads = _heads(run)
    heads = heads[heads["status"] == "ok"]
    ax = _axes(ax)
    what = run.columns("heads")[column]
    ax.set(xlabel="layer", ylabel=what.label, yscale="log" if what.scale == "log" else "linear")
    ax.plot(heads["layer"], heads[column], "o", ms=2.5, alpha=0.5, color=PALETTE[0], label="a head")
    never = math.inf if column.startswith("tokens_needed") else math.nan
    middle = (
        heads.assign(_value=heads[column].fillna(never))
        .groupby("layer")["_value"]
        .median()
        .replace(math.inf, math.nan)
    )
    ax.plot(middle.index, middle, color=PALETTE[1], lw=1.4, label="median")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend()
    return ax


def save_figures(run: Run, formats: Sequence[str], folder: Path) -> list[Path]:
    """Write every figure of a run in every format, one file each, and return the files."""
    unknown = [kind for kind in formats if kind not in FORMATS]
    if unknown or not formats:
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


Plans = dict[str, tuple[tuple[float, float], Callable[..., Any]]]


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
        plans[f"error_{metric}"] = (
            (COLUMN, 2.6),
            partial(errors_panel, curves=part, metric=metric, over=over),
        )
        plans[f"exponent_{metric}"] = ((COLUMN, 2.6), partial(plot_rates, run, metric=metric))
    return plans


def _atlas_plans(run: Run) -> Plans:
    heads = _heads(run)
    tall = 0.9 + 0.16 * heads["layer"].nunique()
    plans: Plans = {}
    for column in [
        *dict.fromkeys([*epsilons_of(heads).values(), need_column(heads, "10")]),
        "beta_fit",
        "coupling",
        "effective_tokens",
        "tokens_exponent",
        "khat",
        "sink_mass",
        "regime",
        "kind",
    ]:
        if column in heads.columns:
            plans[f"map_{column}"] = ((COLUMN, tall), partial(plot_map, run, column))
    measured = heads[heads["status"] == "ok"]
    if measured.empty:
        return plans
    for against in [
        name for name in ("horizon2", "coupling") if {name, "beta_fit"} <= set(heads.columns)
    ]:
        plans[f"exponents_{against}"] = ((COLUMN, 2.8), partial(plot_rates, run, against))
    if read_table(run, "scales") is not None:
        plans["scales"] = ((COLUMN, 3.8), partial(plot_scales, run))
    shown = [name for name in (need_column(heads, "10"), "beta_fit") if name in heads.columns]
    if not shown:
        return plans
    plans["layers"] = ((COLUMN, 2.2), partial(plot_layers, run, shown[0]))
    order = ranked_heads(heads, shown[0])
    for name, row in (("least", order.iloc[0]), ("most", order.iloc[-1])):
        layer, head = int(row["layer"]), int(row["head"])
        plans[f"curve_{name}_demanding_L{layer}H{head}"] = (
            (WIDE * 0.7, 3.4),
            partial(plot_curve, run, layer, head),
        )
        if "tokens_exponent" in heads.columns:
            plans[f"dispersion_{name}_demanding_L{layer}H{head}"] = (
                (COLUMN, 2.6),
                partial(plot_dispersion, run, layer, head),
            )
    return plans


def plot_dispersion(run: Run, layer: int, head: int, *, ax: Any = None) -> Any:
    """Effective tokens of one head against the number of keys, log-log."""
    _row(run, layer, head)
    return draw_dispersion(run, layer, head, _axes(ax))


def plot_scales(run: Run, *, ax: Any = None) -> Any:
    """Exponents of heads whose scores were multiplied with α, against α²."""
    return draw_scales(run, _axes(ax))


def _heads(run: Run) -> Any:
    heads = heads_of(run)
    if heads is None:
        raise ValueError(
            f"{run.path}: expected a run with heads, such as one of esscher probe; it has none"
        )
    return heads


def _row(run: Run, layer: int, head: int) -> Any:
    heads = _heads(run)
    found = heads[(heads["layer"] == layer) & (heads["head"] == head)]
    if found.empty:
        raise ValueError(
            f"layer, head: expected layers {heads['layer'].min()} to {heads['layer'].max()} and"
            f" heads {heads['head'].min()} to {heads['head'].max()} of this run, got layer {layer},"
            f" head {head}"
        )
    return found.iloc[0].to_dict()


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt  # chooses a backend, so only when nobody gave axes

    return plt.subplots(layout="constrained")[1]


def _say(ax: Any, text: str) -> Any:
    ax.text(
        0.5,
        0.5,
        text[:200],
        ha="center",
        va="center",
        transform=ax.transAxes,
        wrap=True,
        parse_math=False,
    )
    return ax


def _brief(value: float) -> str:
    """Four characters or so."""
    if value >= 1e6:
        return f"{value / 1e6:.2g}M" if value < 1e8 else f"{value:.0e}"
    if value >= 1e3:
        return f"{value / 1e3:.0f}k" if value >= 1e4 else f"{value / 1e3:.1f}k"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}".removeprefix("0")
