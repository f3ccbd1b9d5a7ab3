"""Figure files with matplotlib: error curves of laws and sweeps with what theory says of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, NullFormatter

from esscher.report.style import PALETTE, SCALE, STYLE, beside, save_figure, say
from esscher.report.words import TheoryLine

if TYPE_CHECKING:  # so that figures of stored runs need no torch
    from esscher.errors.curve import ErrorCurve
    from esscher.theory.prediction import Prediction

DASHES = {"proved": "-", "heuristic": "--", "experimental": ":", "asymptotic": "-.", "exact": "-"}
HEADROOM = 100.0  # bounds further above the curve than this are left out of the picture


def plot_curve(
    ax: Any, curve: ErrorCurve, *, color: str = PALETTE[0], label: str = "exact"
) -> None:
    """Root mean square error against n, log-log, with its 95 % quantile over queries and, if
    sampled, its standard error.
    """
    ax.plot(curve.n, curve.rms, color=color, label=label, lw=1.6)
    if curve.q95 is not None:
        ax.plot(curve.n, curve.q95, color=color, lw=0.8, ls=":", label=f"{label}, 95 % of queries")
    if curve.stderr.any():
        ax.errorbar(curve.n, curve.rms, yerr=2 * curve.stderr, fmt="none", ecolor=color, lw=0.8)
    ax.set(xscale="log", yscale="log", xlabel="tokens n", ylabel="rms error")


def plot_alone(curve: ErrorCurve, *, ax: Any = None) -> Any:
    """One curve on axes of its own, or on those given, which are returned."""
    with matplotlib.rc_context(STYLE):
        if ax is None:
            import matplotlib.pyplot as plt  # chooses a backend, so only when nobody gave axes

            ax = plt.figure(layout="constrained").subplots()
        plot_curve(ax, curve, label=curve.kind)
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


def _style(prediction: Prediction, i: int) -> dict[str, Any]:
    status = prediction.status
    dash = next((dash for word, dash in DASHES.items() if status.startswith(word)), ":")
    color = PALETTE[1 + i % (len(PALETTE) - 1)]
    return {"color": color, "lw": 1.0, "ls": dash, "label": f"{prediction.name} ({status})"}


def save_predictions(curve: ErrorCurve, found: Sequence[Prediction], path: Path) -> None:
    """Exact error with every bound on it that applies, and below the local exponent beside the
    rates' exponents.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.0, 5.6), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        plot_curve(top, curve)
        plot_bounds(top, curve, found)
        top.set(xlabel="")
        plot_exponents(bottom, curve, found)
        for ax in (top, bottom):
            beside(ax)
        save_figure(figure, path)


def save_rates(
    curves: Any, rates: Any, theory: Sequence[TheoryLine], title: str, over: str, path: Path
) -> None:
    """Left: measured errors (points, two standard errors) and the exact ones (lines). Right:
    exponents against the horizon.

    ``curves`` and ``rates`` are a run's tables as pandas frames, ``theory`` the exponents to draw
    beside the measured ones, ``over`` names what the points differ in; ``curves`` is None where
    nothing could be measured.
    """
    metrics = list(dict.fromkeys(rates["metric"]))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 2.6 * len(metrics) + 0.4), layout="constrained")
        rows = figure.subplots(len(metrics), 2, squeeze=False)
        for (left, right), metric in zip(rows, metrics, strict=True):
            own = None if curves is None else curves[curves["metric"] == metric]
            errors_panel(left, own, metric, over)
            exponents_panel(right, rates[rates["metric"] == metric], theory)
        figure.suptitle(title)
        save_figure(figure, path)


def errors_panel(ax: Any, curves: Any, metric: str, over: str) -> None:
    """Errors of a sweep against n: points with two standard errors, exact ones as lines."""
    ax.set(xscale="log", yscale="log", xlabel="tokens n", ylabel=f"rms error ({metric})")
    if curves is None or curves.empty:
        say(ax, "no limit, nothing to measure")
        return
    points = max(1, int(curves["point"].max()))
    for (point, kind), part in curves.groupby(["point", "kind"]):
        style = {"color": matplotlib.colormaps[SCALE](0.9 * int(point) / points), "lw": 0.8}
        if kind == "montecarlo":
            ends = 2 * part["stderr"]
            ax.errorbar(part["n"], part["rms"], yerr=ends, fmt="o", ms=2.5, **style)
        else:
            ax.plot(part["n"], part["rms"], **style)
    _plain_ticks(ax.xaxis, curves["n"].to_numpy(), 4, "%d")
    if curves["value"].notna().any():
        low, high = curves["value"].min(), curves["value"].max()
        ax.set_title(f"{over} {low:g} (dark) to {high:g} (light)", fontsize=7)


def exponents_panel(ax: Any, rates: Any, theory: Sequence[TheoryLine]) -> None:
    """Measured exponents of a sweep against the horizon, beside those of theory."""
    measured = rates[rates["exponent"].notna()].sort_values("horizon2")
    ax.set(xlabel="two-sided horizon", ylabel="exponent", ylim=(0.0, 0.65))
    ax.axhline(0.5, color=PALETTE[6], lw=0.8, ls=":")
    if measured.empty:
        return
    drawn = ["exponent", "low", "high", *(line.key for line in theory)]
    values = measured[drawn].to_numpy(dtype=np.float64)
    ax.set_ylim(min(0.0, 1.05 * np.nanmin(values)), max(0.65, 1.05 * np.nanmax(values)))
    ax.set_xscale("log")
    _plain_ticks(ax.xaxis, measured["horizon2"].to_numpy(), 6, "%.2g")
    x, y = measured["horizon2"], measured["exponent"]
    ends = np.abs(measured[["low", "high"]].to_numpy().T - y.to_numpy())
    ax.errorbar(x, y, yerr=ends, fmt="o", ms=3, lw=0.8, color=PALETTE[0], label="measured")
    for line in theory:
        if measured[line.key].notna().any():
            style = {"color": PALETTE[line.color], "ls": line.dash, "lw": 1.0}
            ax.plot(x, measured[line.key], label=line.label, **style)
    beside(ax)


def _plain_ticks(axis: Any, values: Any, most: int, pattern: str) -> None:
    """A few ticks where the data are, written as plain numbers."""
    ticks = np.unique(values)
    axis.set_major_formatter(FormatStrFormatter(pattern))
    axis.set_minor_formatter(NullFormatter())
    axis.set_ticks(ticks[:: -(-ticks.size // most)])
