"""Figures 1 to 8 of [S] from the tables of stored runs: concentration, final risks, distances and
risks along training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from esscher.report.style import PALETTE, STYLE, beside, save_figure

COLORS = {"softmax": PALETTE[0], "linear": PALETTE[1], "bayes": PALETTE[2]}
LABELS = {
    "output": "output",
    "gradient": "gradient of the loss, one prompt",
    "risk_gradient": "gradient of the risk (exact)",
    "gradient_U": "gradient of the output in U",
    "gradient_V": "gradient of the output in V",
    "gradient_K": "gradient of the output in K",
    "gradient_Q": "gradient of the output in Q",
}
PANELS = (("output",), ("gradient", "risk_gradient"))
HEADROOM = 1e3  # bounds further above the largest error than this are named, not drawn


def save_concentration(curves: Any, rates: Any, bounds: Any, title: str, path: Path) -> None:
    """Root mean square distance of softmax attention to linear attention (solid) and to the limit
    (dashed) against L.

    Tables of one covariance; labels carry the fitted exponents with their intervals, a line below
    each panel the proved bounds that lie far above it.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.2), layout="constrained")
        for ax, metrics in zip(figure.subplots(1, 2), PANELS, strict=True):
            for i, metric in enumerate(metrics):
                for against, style in (("linear", "-"), ("limit", "--")):
                    exponent = _exponent(_where(rates, metric=metric, against=against))
                    label = f"{LABELS[metric]}, to {against}{exponent}"
                    _error_line(
                        ax, _where(curves, metric=metric, against=against), label, PALETTE[i], style
                    )
            ax.set(
                xscale="log",
                yscale="log",
                xlabel="prompt length L",
                ylabel="root mean square difference",
            )
            _draw_bounds(ax, bounds, metrics[0], curves)
            ax.legend(fontsize=6)
        figure.suptitle(title)
        save_figure(figure, path)


def save_final_risks(trained: Any, flow: Any, noise: float, title: str, path: Path) -> None:
    """Mean squared error after training against L: seeds of SGD (points), gradient flow (lines),
    Bayes on L tokens (line).
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.2), layout="constrained")
        ax = figure.subplots()
        for model, color in COLORS.items():
            line = _where(flow, model=model).sort_values("length")
            name = "Bayes on L tokens" if model == "bayes" else f"{model}, gradient flow"
            ax.plot(line["length"], line["mse"], color=color, lw=1.2, label=name)
            own = _where(trained, model=model)
            if len(own):
                error = 2 * own["stderr"]
                label = f"{model}, SGD"
                ax.errorbar(
                    own["length"],
                    own["mse"],
                    yerr=error,
                    fmt="o",
                    ms=3,
                    lw=0.8,
                    color=color,
                    label=label,
                )
        ax.axhline(noise, color=PALETTE[6], lw=0.8, ls=":", label="label noise")
        ax.set(xscale="log", yscale="log", xlabel="prompt length L", ylabel="mean squared error")
        _decimal_ticks(ax, flow["mse"])
        beside(ax)
        ax.set_title(title, fontsize=8, wrap=True)
        save_figure(figure, path)


def save_flow(flow: Any, noise: float, path: Path) -> None:
    """Mean squared error above the label noise where gradient flow ends, against L: a panel for
    each covariance.
    """
    names = list(dict.fromkeys(flow["covariance"]))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.6 * len(names) + 1.4, 3.0), layout="constrained")
        for ax, name in zip(
            np.atleast_1d(figure.subplots(1, len(names), sharey=True)), names, strict=True
        ):
            for model, color in COLORS.items():
                line = _where(flow, covariance=name, model=model).sort_values("length")
                label = "Bayes on L tokens" if model == "bayes" else f"{model} attention"
                ax.plot(
                    line["length"],
                    line["mse"] - noise,
                    "o-",
                    ms=3,
                    lw=1.2,
                    color=color,
                    label=label,
                )
            ax.set(xscale="log", yscale="log", xlabel="prompt length L", title=name)
        figure.axes[0].set_ylabel("mean squared error above the noise")
        beside(figure.axes[-1])
        save_figure(figure, path)


def save_distances(distance: Any, title: str, path: Path) -> None:
    """Squared distance between the parameters of softmax and linear attention along training, a
    line per seed.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.2), layout="constrained")
        ax = figure.subplots()
        for color, length, part in _lengths(distance):
            for i, (_, own) in enumerate(part.groupby("seed")):
                positive = own[own["distance2"] > 0].sort_values("step")
                label = f"L = {length}" if i == 0 else None
                ax.plot(positive["step"], positive["distance2"], color=color, lw=0.9, label=label)
        ax.set(
            yscale="log",
            xlabel="step",
            ylabel=r"$\|\theta_{\rm softmax} - \theta_{\rm linear}\|^2$",
        )
        beside(ax)
        ax.set_title(title, fontsize=8, wrap=True)
        save_figure(figure, path)


def save_training(curve: Any, flow: Any, noise: float, title: str, path: Path) -> None:
    """Mean squared error along training, mean over seeds with their range; dotted: the end of the
    gradient flow.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 3.0), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for ax, model in zip(axes, ("softmax", "linear"), strict=True):
            for color, length, part in _lengths(_where(curve, model=model)):
                table = part.pivot_table(index="step", columns="seed", values="mse")
                ax.plot(table.index, table.mean(axis=1), color=color, lw=1.0, label=f"L = {length}")
                ax.fill_between(
                    table.index, table.min(axis=1), table.max(axis=1), color=color, alpha=0.2, lw=0
                )
                end = _where(flow, model=model, length=length)
                if len(end):
                    ax.axhline(end["mse"].iloc[0], color=color, lw=0.8, ls=":")
            ax.axhline(noise, color=PALETTE[6], lw=0.8, ls="-.")
            ax.set(xlabel="step", yscale="log", title=f"{model} attention")
            _decimal_ticks(ax, curve["mse"])
        axes[0].set_ylabel("mean squared error")
        beside(axes[1])
        figure.suptitle(title)
        save_figure(figure, path)


def _where(table: Any, **values: Any) -> Any:
    for column, value in values.items():
        table = table[table[column] == value]
    return table


def _lengths(table: Any) -> Iterator[tuple[str, int, Any]]:
    for i, (length, part) in enumerate(table.groupby("length")):
        yield PALETTE[i % len(PALETTE)], int(length), part


def _exponent(rates: Any) -> str:
    if not len(rates) or not np.isfinite(rates["exponent"].iloc[0]):
        return ""
    row = rates.iloc[0]
    return rf", $L^{{-{row['exponent']:.2f}}}$ [{row['low']:.2f}, {row['high']:.2f}]"


def _error_line(ax: Any, part: Any, label: str, color: str, style: str) -> None:
    part = part[part["rms"] > 0].sort_values("n")
    ax.errorbar(
        part["n"],
        part["rms"],
        yerr=2 * part["stderr"],
        color=color,
        ls=style,
        marker="o",
        ms=2,
        lw=0.9,
        label=label,
    )


def _draw_bounds(ax: Any, bounds: Any, metric: str, curves: Any) -> None:
    """Bounds of [S] where the picture can hold them, else how far above it they are."""
    largest = float(_where(curves, metric=metric)["rms"].max())
    metric = "gradient_U" if metric == "gradient" else metric
    far = []
    for i, (name, part) in enumerate(_where(bounds, metric=metric).groupby("name", sort=False)):
        part = part.sort_values("n")
        low = float(part["rms"].min())
        if low < HEADROOM * largest:
            ax.plot(
                part["n"],
                part["rms"],
                color=PALETTE[3 + i],
                ls=":",
                lw=0.9,
                label=f"{name} (proved)",
            )
        else:
            far.append(f"{name}: {low:.1e} or more")
    if far:
        ax.set_title("proved bounds beyond the picture: " + "; ".join(far), fontsize=5)


def _decimal_ticks(ax: Any, values: Any) -> None:
    """Plain numbers on a logarithmic axis of less than two decades."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    ticks = [
        tick
        for tick in (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0)
        if 0.9 * low <= tick <= 1.1 * high
    ]
    if ticks:
        ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.minorticks_off()


# ---- The flows of softmax and linear attention in time: risks, and the distance between them
# below the bound of Lemma E.1.

LINES = {"softmax": "-", "linear": "--", "limit": ":"}
APART = {"distance": "-", "sharper": "--", "bound": ":"}
TIME_HEADROOM = 1e3  # times the largest distance: where the picture ends


def save_in_time(trajectory: Any, apart: Any, columns: Mapping[str, Any], path: Path) -> None:
    """A row of two panels for each covariance: mean squared errors, and distances with what bounds
    them.
    """
    names = list(dict.fromkeys(trajectory["covariance"]))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 2.8 * len(names)), layout="constrained")
        for (left, right), name in zip(
            figure.subplots(len(names), 2, squeeze=False), names, strict=True
        ):
            own, distances = (
                trajectory[trajectory["covariance"] == name],
                apart[apart["covariance"] == name],
            )
            for i, length in enumerate(sorted(set(own["length"]))):
                color = PALETTE[i % len(PALETTE)]
                for model, style in LINES.items():
                    part = own[
                        (own["length"] == length) & (own["model"] == model) & (own["time"] > 0)
                    ]
                    left.plot(part["time"], part["mse"], color=color, ls=style, lw=1.0)
                part = distances[(distances["length"] == length) & (distances["time"] > 0)]
                for key, style in APART.items():
                    label = (
                        f"L = {length:g}, {columns[key].label}"
                        if i == 0
                        else f"L = {length:g}"
                        if key == "distance"
                        else None
                    )
                    right.plot(part["time"], part[key], color=color, ls=style, lw=1.0, label=label)
            left.set(xscale="log", yscale="log", xlabel="time", ylabel="mean squared error")
            left.set_title(f"{name}: softmax -, linear - -, limit ...", fontsize=8)
            right.set(
                xscale="log", yscale="log", xlabel="time", ylabel="distance of the parameters"
            )
            finite = own[own["model"] != "limit"]["mse"]
            left.set_ylim(0.5 * float(finite.min()), 2.0 * float(finite.max()))
            drawn = distances["distance"][distances["time"] > 0]
            right.set_ylim(0.5 * float(drawn.min()), TIME_HEADROOM * float(drawn.max()))
            beside(right)
        save_figure(figure, path)


# ---- Figures of flows from many first weights: how many have not arrived, and how far the two
# models are from each other.

DASHES = {"softmax": "-", "linear": "--"}
MEASURES = (
    ("weights2", "weights"),
    ("modulo2", "weights, modulo scale"),
    ("product2", "value times score"),
)


def save_arrivals(flows: Any, training: float, until: float, path: Path) -> None:
    """Share of starts that have not arrived against time, a panel for each covariance; dotted: the
    end of training.
    """
    names = list(dict.fromkeys(flows["covariance"]))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.0 * len(names) + 1.4, 3.0), layout="constrained")
        for ax, name in zip(
            np.atleast_1d(figure.subplots(1, len(names), sharey=True)), names, strict=True
        ):
            own = flows[flows["covariance"] == name]
            for i, (length, part) in enumerate(own.groupby("length")):
                for model, rows in part.groupby("model", sort=False):
                    times = np.sort(rows["arrival"].fillna(np.inf).to_numpy())
                    shares = 1.0 - np.arange(1, times.size + 1) / times.size
                    seen = times <= until
                    x = np.concatenate([[1.0], times[seen], [until]])
                    y = np.concatenate([[1.0], shares[seen], [1.0 - seen.mean()]])
                    label = f"{model}, L = {length:g}"
                    ax.step(
                        x,
                        y,
                        where="post",
                        color=PALETTE[i % len(PALETTE)],
                        ls=DASHES.get(str(model), ":"),
                        lw=1.1,
                        label=label,
                    )
            ax.axvline(training, color=PALETTE[6], ls=":", lw=0.8)
            ax.set(xscale="log", xlabel="time of the flow", title=name, ylim=(-0.02, 1.02))
        figure.axes[0].set_ylabel("share of starts not arrived")
        beside(figure.axes[-1])
        save_figure(figure, path)


def save_apart(distance: Any, flows: Any, training: float, path: Path) -> None:
    """Squared distance between the two models along the flow in three measures: medians over starts
    where both arrived.
    """
    keys = ["covariance", "length", "seed"]
    arrived = flows.groupby(keys)["status"].agg(lambda known: (known == "ok").all())
    there = distance[distance["time"] > 0].merge(arrived[arrived].reset_index()[keys], on=keys)
    names = list(dict.fromkeys(distance["covariance"]))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 2.4 * len(names) + 0.4), layout="constrained")
        rows = figure.subplots(len(names), len(MEASURES), sharex=True, sharey=True, squeeze=False)
        for name, axes in zip(names, rows, strict=True):
            own = there[there["covariance"] == name]
            for ax, (column, title) in zip(axes, MEASURES, strict=True):
                for i, (length, part) in enumerate(own.groupby("length")):
                    middle = part.groupby("time")[column].median()
                    ax.plot(
                        middle.index,
                        middle,
                        color=PALETTE[i % len(PALETTE)],
                        lw=1.1,
                        label=f"L = {length:g}",
                    )
                ax.axvline(training, color=PALETTE[6], ls=":", lw=0.8)
                ax.set(
                    xscale="log",
                    yscale="log",
                    title=title if name == names[0] else "",
                    ylim=(1e-10, 10.0),
                )
            axes[0].set_ylabel(f"squared distance, {name}", fontsize=7)
        for ax in rows[-1]:
            ax.set_xlabel("time of the flow")
        beside(rows[0][-1])
        save_figure(figure, path)
