"""Pages of charts and tables: of a sweep over laws, of a compression run, of in-context learning
(Figures 1 to 8 of [S]), and of any job that has no page of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from esscher.report.words import (
    answer_of,
    described_table,
    number,
    numbers,
    overview,
    read_table,
    shortened,
    theory_lines,
)
from esscher.runs import Run
from esscher.runs.columns import Column

Chart = dict[str, Any]


def chart_of(
    title: str, x: str, y: str, series: list[Any], note: str = "", log: str = "xy", **more: Any
) -> Chart:
    """A chart as the page and figures draw it; ``log``: its logarithmic axes."""
    axes = {"x": {"label": x, "log": "x" in log}, "y": {"label": y, "log": "y" in log, **more}}
    return {"title": title, "note": note, **axes, "series": series}


def charts_page(
    run: Run, title: str, line: str, charts: list[dict[str, Any]], first: list[str]
) -> dict[str, Any]:
    """A page of charts below the answer, then the run's tables, those named first in front."""
    content = overview(run, "charts", title, [*answer_of(run).sentences, line])
    names = [name for name in first if name in run.tables]
    tables = [described_table(run, name) for name in dict.fromkeys([*names, *run.tables])]
    if not tables:
        content["warnings"].append("This run has no table yet, so there is nothing to show.")
    return content | {"charts": [chart for chart in charts if chart["series"]], "tables": tables}


def tables_page(run: Run) -> dict[str, Any]:
    """A plain page for a job that has no views of its own."""
    title, line = run.spec.get("title") or run.manifest.job, f"Run of {run.manifest.job}."
    return charts_page(run, str(title), shortened(line), [], [])


def sweep(run: Run) -> dict[str, Any]:
    """The page of a sweep over laws: by kind of error, errors against n and exponents against the
    horizon.
    """
    rates, curves = read_table(run, "rates"), read_table(run, "curves")
    over, charts = str((run.spec.get("sweep") or {}).get("over", "")), []
    for metric, own in () if rates is None else rates.groupby("metric", sort=False):
        if curves is not None:
            charts.append(errors_chart(curves[curves["metric"] == metric], metric, over))
        charts.append(exponents_chart(own, metric, run.columns("rates")))
    law = (run.spec.get("law") or {}).items()
    what = ", ".join(f"{key} {value}" for key, value in law if value not in (None, 0.0)) or "a law"
    line = (
        f"Attention on tokens of {shortened(what)}{f', swept over {over}' if over else ''}; error"
        " against the limit on infinitely many tokens."
    )
    title = str(run.spec.get("title") or "Sweep over laws")
    return charts_page(run, title, line, charts, ["rates"])


def errors_chart(curves: Any, metric: str, over: str) -> Chart:
    """Measured and exact errors against n, a colour for each point of the sweep."""
    series: list[dict[str, Any]] = []
    last = 1 if curves.empty else max(1, int(curves["point"].max()))
    for (point, kind), part in curves.groupby(["point", "kind"]):
        value, sampled = part["value"].iloc[0], kind == "montecarlo"
        label = f"{over} {value:g}" if over and value == value else str(kind)
        style = {"mode": "points" if sampled else "line", "unlisted": not sampled}
        shade = round(0.9 * int(point) / last, 3)
        series.append(series_of(label, part, "n", "rms", 0, shade=shade, **style))
    note = "Points: measured, with two standard errors. Lines: exact. Dark to light: the sweep."
    title, y = f"Error of {metric} against tokens", f"rms error ({metric})"
    return chart_of(title, "tokens n", y, series, note)


def exponents_chart(rates: Any, metric: str, columns: Mapping[str, Column]) -> dict[str, Any]:
    """Measured exponents with their intervals, and theory's lines, against the horizon."""
    rates = rates[rates["exponent"].notna()].sort_values("horizon2")
    own = rates[[key for key in ("horizon2", "exponent", "low", "high") if key in rates]]
    series = (
        [series_of("measured", own, "horizon2", "exponent", 0, mode="points")] if len(own) else []
    )
    for line in theory_lines(columns):
        if rates[line["key"]].notna().any():
            x, y = (numbers(rates[key]) for key in ("horizon2", line["key"]))
            series.append({**line, "x": x, "y": y})
    title = f"Exponent of {metric} against the horizon"
    note = "The error falls as n to minus the exponent; 0.5 is the square-root law."
    found = chart_of(title, columns["horizon2"].label, "exponent", series, note, "x", low=0)
    return found | {"marks": [{"y": 0.5, "label": "1/2"}]}


# ---- A compression run: metrics against the share of the cache, predicted against measured loss,
# the text with the keys that are kept.

COLORS = 8  # of the palette; more rules go round
MOST_TOKENS = 4096  # of a prompt on the page; the table has all
SHOWN = ("kl", "kl_behind", "loss_added", "agreement", "needle", "cosine", "error")


def compression_page(run: Run) -> dict[str, Any]:
    """Charts of what there is, then the tables."""
    charts = [*_metrics(run), *_checked(run)]
    model = shortened(str(run.spec.get("model", "")))
    line = f"What {model} loses when its KV cache is compressed."
    first = ["compress", "check", "kinds", "depth"]
    page = charts_page(run, "Compressing a KV cache", line, charts, first=first)
    page["tables"] = [table for table in page["tables"] if table["name"] != "tokens"]
    return page | {"kept": kept_text(run)}


def kept_text(run: Run) -> dict[str, Any] | None:
    """The first prompt with the number of heads that keep each token, by size and layer, and, of a
    compression, the kinds of tokens among kept and among all keys.
    """
    table, kinds = read_table(run, "tokens"), read_table(run, "kinds")
    if table is None:
        return None
    rule, split = table["rule"].iloc[0], table["split"].iloc[0]
    sizes: list[dict[str, Any]] = []
    for keep, own in table.groupby("keep", dropna=False):
        own = own.sort_values("position").head(MOST_TOKENS)
        counts = [list(map(int, layer)) for layer in zip(*own["heads"], strict=True)]
        sizes.append({"keep": number(keep), "heads": counts})
        if kinds is not None:
            same = kinds[(kinds["rule"] == rule) & (kinds["split"] == split)]
            same = same[(same["keep"] == keep) | (same["keep"].isna() & (keep != keep))]
            sizes[-1] |= {"kinds": list(map(str, same["kind"]))}
            sizes[-1] |= {name: numbers(same[name]) for name in ("kept_share", "held_share")}
    heads = list(map(int, own["heads_all"].iloc[0]))
    layers = list(run.spec.get("layers") or ())
    return {
        "rule": str(rule),
        "split": str(split),
        "layers": layers if len(layers) == len(heads) else list(range(len(heads))),
        "tokens": list(map(str, own["token"])),
        "total": int(table["position"].max()) + 1,
        "heads": heads,
        "sizes": sizes,
    }


def _rule_lines(own: Any, x: str, y: str, ends: tuple[str, str] | None) -> list[dict[str, Any]]:
    """A line for each rule and split."""
    found = []
    for i, ((rule, split), part) in enumerate(own.groupby(["rule", "split"], sort=False)):
        label = str(rule) if split in ("uniform", "cut") else f"{rule}, {split}"
        names = dict(zip(ends or (), ("low", "high"), strict=False))
        drawn = part[[x, y, *names]].rename(columns=names)
        dash = "solid" if i < COLORS else "dashed"
        found.append(series_of(label, drawn, x, y, i, dash=dash))
    return found


def _metrics(run: Run) -> list[dict[str, Any]]:
    """A chart for each metric against the share of the cache, with intervals over texts."""
    table = read_table(run, "compress")
    if table is None or "share" not in table:
        return []
    own, columns, charts = table[table["rule"] != "full"], run.columns("compress"), []
    for key in SHOWN:
        if key in own and own[key].notna().any():
            log = "xy" if key in ("kl", "error") and (own[key] > 0).all() else "x"
            series = _rule_lines(own[own[key].notna()], "share", key, columns[key].ends)
            note = f"{columns[key].help} Bars, from three texts on: 95 % intervals over texts."
            x, y = columns["share"].label, columns[key].label
            charts.append(chart_of(f"{y} against the share of the cache", x, y, series, note, log))
    return charts


def _checked(run: Run) -> list[dict[str, Any]]:
    """Measured against predicted loss, a point for each rule and size, and the diagonal."""
    table = read_table(run, "compress")
    if table is None or "kl_predicted" not in table:
        return []
    own = table[(table["kl_predicted"] > 0) & (table["kl"] > 0)]
    if not len(own):
        return []
    both = own[["kl", "kl_predicted"]]
    ends = [float(both.min().min()), float(both.max().max())]
    series = [row | {"mode": "points"} for row in _rule_lines(own, "kl_predicted", "kl", None)]
    series.append({"label": "predicted = measured", "color": 7, "x": ends, "y": ends})
    note = (
        "Predicted from the exact errors of all heads at the decoded tokens and their Fisher"
        " metric, no constant fitted. Second order: right below about 0.2 nats."
    )
    x, y = (f"{word} KL, nats per token" for word in ("predicted", "measured"))
    return [chart_of("Predicted against measured loss", x, y, series, note)]


# ---- In-context learning.

MODELS = {"softmax": 0, "linear": 1, "bayes": 2}  # places in the palette
DASHES = {"softmax": "solid", "linear": "dashed"}
AGAINST = {"linear": "from linear attention", "limit": "from infinitely many tokens"}
PROMPT, ERROR = "prompt length L", "mean squared error"
HEADROOM = 1e3  # bounds this many times above the largest error are not drawn


def icl_page(run: Run) -> dict[str, Any]:
    """Charts of what the run measured, then its tables."""
    known: dict[str, dict[str, tuple[str, Callable[..., Chart]]]] = {
        "icl-train": {
            "final": ("Risk after training", risk_chart),
            "curve": ("Risk along training", training_chart),
            "distance": ("Distance between the two models", distance_chart),
        },
        "icl-flow": {"final": ("Where gradient flow ends", partial(flow_chart, run.spec["noise"]))},
    }
    charts: list[Chart] = []
    for name, (title, chart) in known.get(run.manifest.job, {}).items():
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


def series_of(label: str, part: Any, x: str, y: str, color: int, **style: Any) -> dict[str, Any]:
    """A line, or points, in the order of x; with two standard errors to both sides, or the columns
    low and high, where the table has them.
    """
    part = part.sort_values(x)
    found = {"label": label, "color": color % COLORS, **style}
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
            series.append(series_of(label, part, "length", "mse", MODELS.get(model, 2), **style))
    note = "" if seeds is None else "A point per seed, with two standard errors."
    return chart_of(title, PROMPT, y, series, note)


def flow_chart(noise: float, title: str, final: Any) -> Chart:
    """Where gradient flow ends: errors above the noise, of both models and of Bayes."""
    above = final.assign(mse=final["mse"] - noise)
    return risk_chart(title, flow=above, y=f"{ERROR} above the noise")


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
        series.append(series_of(label, by_step, "step", "mean", color, dash=dash))
        for end in () if flow is None else _where(flow, length=length, model=model)["mse"]:
            level = by_step.assign(mean=end)[["step", "mean"]]
            label = f"{model}, end of the flow"
            series.append(series_of(label, level, "step", "mean", color, dash="dotted"))
    return chart_of(title, "step", ERROR, series, "Means over seeds, with their range.")


def distance_chart(title: str, distance: Any) -> Chart:
    """Squared distance between the parameters of softmax and linear attention along training, a
    line per seed.
    """
    series = []
    for color, (length, part) in enumerate(distance.groupby("length")):
        for seed, own in part[part["distance2"] > 0].groupby("seed"):
            label = f"L = {length}, seed {seed}"
            series.append(series_of(label, own, "step", "distance2", color))
    return chart_of(title, "step", "squared distance", series, "A line per seed.")


def concentration_charts(curves: Any, rates: Any = None, bounds: Any = None) -> list[Chart]:
    """A chart for each metric: root mean square distance of softmax attention to linear attention
    and to the limit against L, fitted exponents in the labels, and proved bounds that the picture
    can hold.
    """
    keys, charts = ["covariance", "against", "metric"], []
    fitted = {} if rates is None else rates.set_index(keys)["exponent"].to_dict()
    for metric in dict.fromkeys(curves["metric"]):
        own = _where(curves, metric=metric)
        own = own[own["rms"] > 0]
        series: list[dict[str, Any]] = []
        for (covariance, against), part in own.groupby(keys[:2], sort=False):
            exponent = fitted.get((covariance, against, metric), math.nan)
            told = f", exponent {exponent:.2f}" if math.isfinite(exponent) else ""
            label = shortened(f"{covariance}, {AGAINST.get(against, against)}{told}")
            series.append(series_of(label, part, "n", "rms", len(series), mode="points"))
        of = "gradient_U" if metric == "gradient" else metric
        for name, part in () if bounds is None else _where(bounds, metric=of).groupby("name"):
            if part["rms"].min() >= HEADROOM * own["rms"].max():
                continue
            for covariance, line in part.groupby("covariance", sort=False):
                label = f"{name} (proved), {covariance}"
                series.append(series_of(label, line, "n", "rms", len(series), dash="dotted"))
        title = f"Concentration: {metric.replace('_', ' ')}"
        charts.append(chart_of(title, PROMPT, "root mean square difference", series))
    return charts


def _where(table: Any, **values: Any) -> Any:
    for column, value in values.items():
        table = table[table[column] == value]
    return table
