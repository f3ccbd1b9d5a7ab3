"""In-context learning from stored tables: charts of risks, training and concentration, which the
page of a run shows and figure files draw (Figures 1 to 8 of [S]).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from esscher.report.charts import charts_page
from esscher.report.figures import draw_chart
from esscher.report.style import PALETTE, STYLE, save_figure
from esscher.report.words import numbers, read_table, shortened
from esscher.runs import Run

Chart = dict[str, Any]
MODELS = {"softmax": 0, "linear": 1, "bayes": 2}  # places in the palette
DASHES = {"softmax": "solid", "linear": "dashed"}
LABELS = {
    "output": "output",
    "gradient": "gradient of the loss, one prompt",
    "risk_gradient": "gradient of the risk (exact)",
} | {f"gradient_{part}": f"gradient of the output in {part}" for part in "UVKQ"}
AGAINST = {"linear": "from linear attention", "limit": "from infinitely many tokens"}
ENDED = ("icl-train", "icl-flow")  # jobs whose tables final, curve, distance are charts
PROMPT, ERROR = "prompt length L", "mean squared error"
HEADROOM = 1e3  # bounds this many times above the largest error are named, not drawn


def icl_page(run: Run) -> dict[str, Any]:
    """Charts of what the run measured, then its tables."""
    known: dict[str, tuple[str, Callable[..., Chart]]] = {
        "final": ("Risk after training", risk_chart),
        "curve": ("Risk along training", training_chart),
        "distance": ("Distance between the two models", distance_chart),
    }
    charts: list[Chart] = []
    for name, (title, chart) in known.items() if run.manifest.job in ENDED else ():
        table = read_table(run, name)
        for covariance, own in () if table is None else table.groupby("covariance", sort=False):
            charts.append(chart(f"{title} ({shortened(str(covariance), 40)})", own))
    curves, rates = read_table(run, "curves"), read_table(run, "rates")
    if curves is not None:
        charts += concentration_charts(curves, rates, read_table(run, "bounds"))
    line = (
        "Softmax against linear attention on linear regression in context in dimension"
        f" {run.spec['dim']} with label noise {run.spec['noise']:g}."
    )
    return charts_page(run, "In-context learning", line, charts, first=["final", "rates"])


def _chart(title: str, x: str, y: str, series: list[Any], note: str = "") -> Chart:
    axes = {"x": {"label": x, "log": True}, "y": {"label": y, "log": True}}
    return {"title": title, "note": note, **axes, "series": series}


def _series(label: str, part: Any, x: str, y: str, color: int, **style: Any) -> dict[str, Any]:
    """A line, or points, in the order of x; with two standard errors to both sides, or the columns
    low and high, where the table has them.
    """
    part = part.sort_values(x)
    found = {"label": label, "color": color % len(PALETTE), **style}
    found |= {"x": numbers(part[x]), "y": numbers(part[y])}
    if "stderr" in part and part["stderr"].any():
        part = part.assign(low=part[y] - 2 * part["stderr"], high=part[y] + 2 * part["stderr"])
    return found | {end: numbers(part[end]) for end in ("low", "high") if end in part}


def risk_chart(title: str, seeds: Any = None, flow: Any = None, y: str = ERROR) -> Chart:
    """Mean squared error against the prompt length: a point per seed, lines where gradient flow
    ends and for Bayes on L tokens.
    """
    series, trained = [], "" if flow is None else ", SGD"
    for table, what, style in ((flow, ", gradient flow", {}), (seeds, trained, {"mode": "points"})):
        for model, part in () if table is None else table.groupby("model", sort=False):
            label = "Bayes on L tokens" if model == "bayes" else f"{model}{what}"
            series.append(_series(label, part, "length", "mse", MODELS.get(model, 2), **style))
    note = "" if seeds is None else "A point per seed, with two standard errors."
    return _chart(title, PROMPT, y, series, note)


def training_chart(title: str, curve: Any, flow: Any = None) -> Chart:
    """Mean squared error along training, mean over seeds with their range; dotted: the end of the
    gradient flow.
    """
    series, lengths = [], sorted(set(curve["length"]))
    curve = curve[curve["step"] > 0]
    for (length, model), part in curve.groupby(["length", "model"], sort=False):
        by_step = part.groupby("step")["mse"].agg(["mean", "min", "max"]).reset_index()
        if part["seed"].nunique() > 1:
            by_step = by_step.rename(columns={"min": "low", "max": "high"})
        color, dash = lengths.index(length), DASHES.get(model, "solid")
        label = f"{model}, L = {length}"
        series.append(_series(label, by_step, "step", "mean", color, dash=dash))
        for end in () if flow is None else _where(flow, length=length, model=model)["mse"]:
            level = by_step.assign(mean=end)[["step", "mean"]]
            label = f"{model}, end of the flow"
            series.append(_series(label, level, "step", "mean", color, dash="dotted"))
    return _chart(title, "step", ERROR, series, "Means over seeds, with their range.")


def distance_chart(title: str, distance: Any) -> Chart:
    """Squared distance between the parameters of softmax and linear attention along training, a
    line per seed.
    """
    series = []
    for color, (length, part) in enumerate(distance.groupby("length")):
        for seed, own in part[part["distance2"] > 0].groupby("seed"):
            label = f"L = {length}, seed {seed}"
            series.append(_series(label, own, "step", "distance2", color))
    return _chart(title, "step", "squared distance", series, "A line per seed.")


def concentration_charts(curves: Any, rates: Any = None, bounds: Any = None) -> list[Chart]:
    """A chart for each metric: root mean square distance of softmax attention to linear attention
    and to the limit against L, fitted exponents in the labels, proved bounds where the picture can
    hold them, else how far above it they are.
    """
    keys, charts = ["covariance", "against", "metric"], []
    fitted = {} if rates is None else rates.set_index(keys)["exponent"].to_dict()
    for metric in dict.fromkeys(curves["metric"]):
        own = _where(curves, metric=metric)
        own = own[own["rms"] > 0]
        series: list[dict[str, Any]] = []
        far = []
        for (covariance, against), part in own.groupby(keys[:2], sort=False):
            exponent = fitted.get((covariance, against, metric), math.nan)
            told = f", exponent {exponent:.2f}" if math.isfinite(exponent) else ""
            label = shortened(f"{covariance}, {AGAINST.get(against, against)}{told}")
            series.append(_series(label, part, "n", "rms", len(series), mode="points"))
        of = "gradient_U" if metric == "gradient" else metric
        for name, part in () if bounds is None else _where(bounds, metric=of).groupby("name"):
            if part["rms"].min() < HEADROOM * own["rms"].max():
                for covariance, line in part.groupby("covariance", sort=False):
                    label = f"{name} (proved), {covariance}"
                    series.append(_series(label, line, "n", "rms", len(series), dash="dotted"))
            else:
                far.append(f"{name}: {part['rms'].min():.1e} or more")
        note = f"Proved bounds beyond the picture: {'; '.join(far)}." if far else ""
        title, y = f"Concentration: {LABELS.get(metric, metric)}", "root mean square difference"
        charts.append(_chart(title, PROMPT, y, series, note))
    return charts


def _where(table: Any, **values: Any) -> Any:
    for column, value in values.items():
        table = table[table[column] == value]
    return table


def save_charts(charts: Sequence[Chart], path: Path, title: str = "") -> None:
    """Charts as a figure file, two in a row."""
    columns = min(2, len(charts))
    rows = math.ceil(len(charts) / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.4 * columns, 3.2 * rows), layout="constrained")
        for place, chart in enumerate(charts):
            ax = draw_chart(chart, ax=figure.add_subplot(rows, columns, place + 1))
            ax.set_title("\n".join(filter(None, (chart["title"], chart["note"]))), fontsize=7)
            ax.legend(fontsize=5)
        figure.suptitle(title)
        save_figure(figure, path)
