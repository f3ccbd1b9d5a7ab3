"""In-context learning from stored tables: the page of a run, Figures 1 to 8 of [S], flows in time
and flows from many first weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from esscher.report.charts import charts_page
from esscher.report.style import PALETTE, STYLE, beside, save_figure
from esscher.report.words import numbers, read_table, shortened
from esscher.runs import Run

MODELS = {"softmax": 0, "linear": 1, "bayes": 2}  # places in the palette
STYLES = {"softmax": "-", "linear": "--", "limit": ":"}
LABELS = {
    "output": "output",
    "gradient": "gradient of the loss, one prompt",
    "risk_gradient": "gradient of the risk (exact)",
} | {f"gradient_{part}": f"gradient of the output in {part}" for part in "UVKQ"}
AGAINST = {"linear": "from linear attention", "limit": "from infinitely many tokens"}
PROMPT = {"label": "prompt length L", "log": True}
HEADROOM = 1e3  # bounds this many times above the largest error are named, not drawn


# The page.


def icl_page(run: Run) -> dict[str, Any]:
    """Charts by what the run measured, then its tables."""
    charts = [*_risks(run), *_training(run), *_concentration(run)]
    noise, dim = run.spec.get("noise"), run.spec.get("dim")
    told = ""
    if isinstance(noise, float) and dim is not None:
        told = f" in dimension {dim} with label noise {noise:g}"
    line = f"Softmax against linear attention on linear regression in context{told}."
    title = str(run.spec.get("title") or "In-context learning")
    return charts_page(run, title, line, charts, first=["final", "rates"])


def _frames(run: Run, name: str, columns: set[str]) -> Iterator[tuple[str, Any]]:
    """A table of a run by covariance, with what a title adds for it; nothing if columns are
    missing.
    """
    frame = read_table(run, name)
    if frame is not None and columns <= set(frame.columns):
        for covariance, own in frame.groupby("covariance", sort=False):
            yield f" ({shortened(str(covariance), 40)})", own


def _ends(part: Any, column: str) -> dict[str, Any]:
    """Two standard errors to both sides, where the table has them."""
    if "stderr" not in part or not part["stderr"].any():
        return {}
    low, high = (numbers(part[column] + side * part["stderr"]) for side in (-2, 2))
    return {"low": low, "high": high}


def _risks(run: Run) -> Iterator[dict[str, Any]]:
    """Risk at the end of training against the prompt length, a point per seed."""
    for named, own in _frames(run, "final", {"model", "mse", "length", "covariance"}):
        series = []
        for model, part in own.sort_values("length").groupby("model", sort=False):
            points = {"x": numbers(part["length"]), "y": numbers(part["mse"])}
            style = {"label": str(model), "mode": "points", "color": MODELS.get(str(model), 2)}
            series.append(style | points | _ends(part, "mse"))
        yield {
            "title": f"Risk after training{named}",
            "note": "A point per seed, with two standard errors.",
            "x": PROMPT,
            "y": {"label": run.columns("final")["mse"].label, "log": True},
            "series": series,
        }


def _training(run: Run) -> Iterator[dict[str, Any]]:
    """Risk, and the distance between the two models, along training; means over seeds."""
    for name, column, title in (
        ("curve", "mse", "Risk along training"),
        ("distance", "distance2", "Distance between the two models"),
    ):
        for named, own in _frames(run, name, {"step", column, "length", "covariance"}):
            series, lengths = [], sorted(set(own["length"]))
            own = own[own["step"] > 0]
            own = own if "model" in own else own.assign(model="models")
            for (model, length), part in own.groupby(["model", "length"], sort=False):
                mean = part.groupby("step")[column].mean()
                dash = ("solid", "dashed", "dotted", "dashdot")[lengths.index(length) % 4]
                style = {"color": MODELS.get(str(model), 2), "dash": dash}
                points = {"x": numbers(mean.index), "y": numbers(mean)}
                series.append({"label": f"{model}, L = {length}", **points, **style})
            yield {
                "title": f"{title}{named}",
                "note": "Means over seeds.",
                "x": {"label": "step", "log": True},
                "y": {"label": run.columns(name)[column].label, "log": True},
                "series": series,
            }


def _concentration(run: Run) -> Iterator[dict[str, Any]]:
    """Error of output and gradients against the prompt length, with the fitted exponents in the
    legend.
    """
    curves, rates = read_table(run, "curves"), read_table(run, "rates")
    if curves is None or not {"n", "rms", "metric", "against", "covariance"} <= set(curves.columns):
        return
    keys = ["covariance", "against", "metric"]
    fitted = {} if rates is None else rates.set_index(keys)["exponent"].to_dict()
    for metric, own in curves.groupby("metric", sort=False):
        series = []
        groups = own.groupby(["covariance", "against"], sort=False)
        for i, ((covariance, against), part) in enumerate(groups):
            exponent = fitted.get((covariance, against, metric), float("nan"))
            told = f", exponent {exponent:.2f}" if exponent == exponent else ""
            label = shortened(f"{covariance}, {AGAINST.get(str(against), str(against))}{told}")
            points = {"x": numbers(part["n"]), "y": numbers(part["rms"])}
            style = {"label": label, "mode": "points", "color": i % 6}
            series.append(style | points | _ends(part, "rms"))
        y = {"label": run.columns("curves")["rms"].label, "log": True}
        title = f"Concentration: {LABELS.get(str(metric), str(metric))}"
        yield {"title": title, "note": "", "x": PROMPT, "y": y, "series": series}


# Figures.


@contextmanager
def _drawn(
    path: Path, size: tuple[float, float], rows: int = 1, columns: int = 1, **share: Any
) -> Iterator[Any]:
    """Rows of axes on a figure of some inches, which is then written."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **share)
        yield axes
        save_figure(figure, path)


def _logarithmic(ax: Any, xlabel: str, ylabel: str = "", **more: Any) -> None:
    ax.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel, **more)


def _where(table: Any, **values: Any) -> Any:
    for column, value in values.items():
        table = table[table[column] == value]
    return table


def _lengths(table: Any) -> Iterator[tuple[str, int, Any]]:
    for i, (length, part) in enumerate(table.groupby("length")):
        yield PALETTE[i % len(PALETTE)], int(length), part


def save_concentration(curves: Any, rates: Any, bounds: Any, title: str, path: Path) -> None:
    """Root mean square distance of softmax attention to linear attention (solid) and to the limit
    (dashed) against L.

    Tables of one covariance; labels carry the fitted exponents with their intervals, a line below
    each panel the proved bounds that lie far above it.
    """
    panels = (("output",), ("gradient", "risk_gradient"))
    with _drawn(path, (7.2, 3.2), 1, 2) as axes:
        for ax, metrics in zip(axes[0], panels, strict=True):
            for i, metric in enumerate(metrics):
                for against, style in (("linear", "-"), ("limit", "--")):
                    part = _where(curves, metric=metric, against=against).sort_values("n")
                    part, label = part[part["rms"] > 0], f"{LABELS[metric]}, to {against}"
                    for row in _where(rates, metric=metric, against=against).to_dict("records"):
                        if np.isfinite(row["exponent"]):
                            label += rf", $L^{{-{row['exponent']:.2f}}}$"
                            label += f" [{row['low']:.2f}, {row['high']:.2f}]"
                    look: Any = {"color": PALETTE[i], "ls": style, "marker": "o", "ms": 2}
                    error = 2 * part["stderr"]
                    ax.errorbar(part["n"], part["rms"], error, lw=0.9, label=label, **look)
            _logarithmic(ax, "prompt length L", "root mean square difference")
            _draw_bounds(ax, bounds, metrics[0], curves)
            ax.legend(fontsize=6)
        axes[0, 0].figure.suptitle(title)


def _draw_bounds(ax: Any, bounds: Any, metric: str, curves: Any) -> None:
    """Bounds of [S] where the picture can hold them, else how far above it they are."""
    largest = float(_where(curves, metric=metric)["rms"].max())
    metric = "gradient_U" if metric == "gradient" else metric
    far = []
    for i, (name, part) in enumerate(_where(bounds, metric=metric).groupby("name", sort=False)):
        part = part.sort_values("n")
        low = float(part["rms"].min())
        if low < HEADROOM * largest:
            look: Any = {"color": PALETTE[3 + i], "ls": ":", "lw": 0.9}
            ax.plot(part["n"], part["rms"], label=f"{name} (proved)", **look)
        else:
            far.append(f"{name}: {low:.1e} or more")
    if far:
        ax.set_title("proved bounds beyond the picture: " + "; ".join(far), fontsize=5)


def save_final_risks(trained: Any, flow: Any, noise: float, title: str, path: Path) -> None:
    """Mean squared error after training against L: seeds of SGD (points), gradient flow (lines),
    Bayes on L tokens (line).
    """
    with _drawn(path, (5.6, 3.2)) as [[ax]]:
        for model, place in MODELS.items():
            color, line = PALETTE[place], _where(flow, model=model).sort_values("length")
            name = "Bayes on L tokens" if model == "bayes" else f"{model}, gradient flow"
            ax.plot(line["length"], line["mse"], color=color, lw=1.2, label=name)
            own = _where(trained, model=model)
            if len(own):
                look: Any = {"fmt": "o", "ms": 3, "lw": 0.8, "color": color}
                error = 2 * own["stderr"]
                ax.errorbar(own["length"], own["mse"], error, label=f"{model}, SGD", **look)
        ax.axhline(noise, color=PALETTE[6], lw=0.8, ls=":", label="label noise")
        _logarithmic(ax, "prompt length L", "mean squared error")
        _decimal_ticks(ax, flow["mse"])
        beside(ax)
        ax.set_title(title, fontsize=8, wrap=True)


def save_flow(flow: Any, noise: float, path: Path) -> None:
    """Mean squared error above the label noise where gradient flow ends, against L: a panel for
    each covariance.
    """
    names = list(dict.fromkeys(flow["covariance"]))
    size = (3.6 * len(names) + 1.4, 3.0)
    with _drawn(path, size, 1, len(names), sharey=True) as axes:
        for ax, name in zip(axes[0], names, strict=True):
            for model, place in MODELS.items():
                line = _where(flow, covariance=name, model=model).sort_values("length")
                label = "Bayes on L tokens" if model == "bayes" else f"{model} attention"
                look: Any = {"ms": 3, "lw": 1.2, "color": PALETTE[place]}
                ax.plot(line["length"], line["mse"] - noise, "o-", label=label, **look)
            _logarithmic(ax, "prompt length L", title=name)
        axes[0, 0].set_ylabel("mean squared error above the noise")
        beside(axes[0, -1])


def save_distances(distance: Any, title: str, path: Path) -> None:
    """Squared distance between the parameters of softmax and linear attention along training, a
    line per seed.
    """
    with _drawn(path, (5.6, 3.2)) as [[ax]]:
        for color, length, part in _lengths(distance):
            for i, (_, own) in enumerate(part.groupby("seed")):
                positive = own[own["distance2"] > 0].sort_values("step")
                label = f"L = {length}" if i == 0 else None
                ax.plot(positive["step"], positive["distance2"], color=color, lw=0.9, label=label)
        apart = r"$\|\theta_{\rm softmax} - \theta_{\rm linear}\|^2$"
        ax.set(yscale="log", xlabel="step", ylabel=apart)
        beside(ax)
        ax.set_title(title, fontsize=8, wrap=True)


def save_training(curve: Any, flow: Any, noise: float, title: str, path: Path) -> None:
    """Mean squared error along training, mean over seeds with their range; dotted: the end of the
    gradient flow.
    """
    with _drawn(path, (8.0, 3.0), 1, 2, sharey=True) as [axes]:
        for ax, model in zip(axes, ("softmax", "linear"), strict=True):
            for color, length, part in _lengths(_where(curve, model=model)):
                table = part.pivot_table(index="step", columns="seed", values="mse")
                ax.plot(table.index, table.mean(axis=1), color=color, lw=1.0, label=f"L = {length}")
                low, high = table.min(axis=1), table.max(axis=1)
                ax.fill_between(table.index, low, high, color=color, alpha=0.2, lw=0)
                for end in _where(flow, model=model, length=length)["mse"]:
                    ax.axhline(end, color=color, lw=0.8, ls=":")
            ax.axhline(noise, color=PALETTE[6], lw=0.8, ls="-.")
            ax.set(xlabel="step", yscale="log", title=f"{model} attention")
            _decimal_ticks(ax, curve["mse"])
        axes[0].set_ylabel("mean squared error")
        beside(axes[1])
        axes[0].figure.suptitle(title)


def _decimal_ticks(ax: Any, values: Any) -> None:
    """Plain numbers on a logarithmic axis of less than two decades."""
    low, high = 0.9 * float(np.nanmin(values)), 1.1 * float(np.nanmax(values))
    plain = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0)
    ticks = [tick for tick in plain if low <= tick <= high]
    if ticks:
        ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.minorticks_off()


def save_in_time(trajectory: Any, apart: Any, columns: Mapping[str, Any], path: Path) -> None:
    """A row of two panels for each covariance: mean squared errors, and distances with the bounds
    of Lemma E.1.
    """
    names = list(dict.fromkeys(trajectory["covariance"]))
    trajectory, apart = (table[table["time"] > 0] for table in (trajectory, apart))
    with _drawn(path, (8.4, 2.8 * len(names)), len(names), 2) as axes:
        for (left, right), name in zip(axes, names, strict=True):
            own, distances = _where(trajectory, covariance=name), _where(apart, covariance=name)
            for color, length, rows in _lengths(own):
                for model, style in STYLES.items():
                    part = _where(rows, model=model)
                    left.plot(part["time"], part["mse"], color=color, ls=style, lw=1.0)
                part, first = _where(distances, length=length), length == own["length"].min()
                for key, style in (("distance", "-"), ("sharper", "--"), ("bound", ":")):
                    label = f"L = {length:g}" if first or key == "distance" else None
                    label = f"{label}, {columns[key].label}" if first else label
                    right.plot(part["time"], part[key], color=color, ls=style, lw=1.0, label=label)
            _logarithmic(left, "time", "mean squared error")
            left.set_title(f"{name}: softmax -, linear - -, limit ...", fontsize=8)
            _logarithmic(right, "time", "distance of the parameters")
            finite, drawn = own[own["model"] != "limit"]["mse"], distances["distance"]
            left.set_ylim(0.5 * float(finite.min()), 2.0 * float(finite.max()))
            right.set_ylim(0.5 * float(drawn.min()), HEADROOM * float(drawn.max()))
            beside(right)


def save_arrivals(flows: Any, training: float, until: float, path: Path) -> None:
    """Share of starts that have not arrived against time, a panel for each covariance; dotted: the
    end of training.
    """
    names = list(dict.fromkeys(flows["covariance"]))
    size = (3.0 * len(names) + 1.4, 3.0)
    with _drawn(path, size, 1, len(names), sharey=True) as [axes]:
        for ax, name in zip(axes, names, strict=True):
            for color, length, part in _lengths(_where(flows, covariance=name)):
                for model, rows in part.groupby("model", sort=False):
                    times = np.sort(rows["arrival"].fillna(np.inf).to_numpy())
                    seen = times <= until
                    shares = 1.0 - np.arange(1, times.size + 1) / times.size
                    x = np.concatenate([[1.0], times[seen], [until]])
                    y = np.concatenate([[1.0], shares[seen], [1.0 - seen.mean()]])
                    look: Any = {"color": color, "ls": STYLES[str(model)], "lw": 1.1}
                    ax.step(x, y, where="post", label=f"{model}, L = {length:g}", **look)
            ax.axvline(training, color=PALETTE[6], ls=":", lw=0.8)
            ax.set(xscale="log", xlabel="time of the flow", title=name, ylim=(-0.02, 1.02))
        axes[0].set_ylabel("share of starts not arrived")
        beside(axes[-1])


def save_apart(distance: Any, flows: Any, training: float, path: Path) -> None:
    """Squared distance between the two models along the flow in three measures: medians over starts
    where both arrived.
    """
    measures = {"weights2": "weights", "modulo2": "weights, modulo scale"}
    measures |= {"product2": "value times score"}
    keys = ["covariance", "length", "seed"]
    arrived = flows.groupby(keys)["status"].agg(lambda known: (known == "ok").all())
    there = distance[distance["time"] > 0].merge(arrived[arrived].reset_index()[keys], on=keys)
    names = list(dict.fromkeys(distance["covariance"]))
    size = (8.4, 2.4 * len(names) + 0.4)
    with _drawn(path, size, len(names), len(measures), sharex=True, sharey=True) as rows:
        for name, axes in zip(names, rows, strict=True):
            for ax, (column, title) in zip(axes, measures.items(), strict=True):
                for color, length, part in _lengths(_where(there, covariance=name)):
                    middle = part.groupby("time")[column].median()
                    ax.plot(middle.index, middle, color=color, lw=1.1, label=f"L = {length:g}")
                ax.axvline(training, color=PALETTE[6], ls=":", lw=0.8)
                _logarithmic(ax, "", title=title if name == names[0] else "", ylim=(1e-10, 10.0))
            axes[0].set_ylabel(f"squared distance, {name}", fontsize=7)
        for ax in rows[-1]:
            ax.set_xlabel("time of the flow")
        beside(rows[0][-1])
