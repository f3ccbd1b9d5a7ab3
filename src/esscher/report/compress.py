"""The page of a compression run: metrics against the share of the cache, predicted against measured
loss, the text with the keys that are kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from esscher.report.charts import charts_page
from esscher.report.figures import draw_chart
from esscher.report.style import STYLE, WIDE, save_figure, say
from esscher.report.words import answer_of, number, numbers, read_table, shortened
from esscher.runs import Run

COLORS = 8  # of the palette; more rules go round
MOST_TOKENS = 4096  # of a prompt on the page; the table has all
SHOWN = ("kl", "kl_behind", "loss_added", "agreement", "needle", "cosine", "neighbour", "error")


def compression_page(run: Run) -> dict[str, Any]:
    """Charts of what there is, then the tables."""
    charts = [*_metrics(run), *_checked(run)]
    model = shortened(str(run.spec.get("model", "")))
    told = answer_of(run).sentences
    line = " ".join(told) or f"What {model} loses when its KV cache is compressed."
    first = ["compress", "check", "kinds", "depth"]
    page = charts_page(run, "Compressing a KV cache", line, charts, first=first)
    page["tables"] = [table for table in page["tables"] if table["name"] != "tokens"]
    return page | {"kept": _kept(run)}


def _kept(run: Run) -> dict[str, Any] | None:
    """The first prompt with the number of heads that keep each token, by size and layer, and the
    kinds of tokens among kept and among all keys.
    """
    table, kinds = read_table(run, "tokens"), read_table(run, "kinds")
    if table is None or kinds is None or not len(table):
        return None
    rule, split = table["rule"].iloc[0], table["split"].iloc[0]
    kinds = kinds[(kinds["rule"] == rule) & (kinds["split"] == split)]
    sizes = []
    for keep, own in table.groupby("keep", dropna=False):
        own = own.sort_values("position").head(MOST_TOKENS)
        same = kinds[(kinds["keep"] == keep) | (kinds["keep"].isna() & (keep != keep))]
        sizes.append(
            {
                "keep": number(keep),
                "heads": [list(map(int, layer)) for layer in zip(*own["heads"], strict=True)],
                "kinds": list(map(str, same["kind"])),
                "kept_share": numbers(same["kept_share"]),
                "held_share": numbers(same["held_share"]),
            }
        )
    return {
        "rule": str(rule),
        "split": str(split),
        "tokens": list(map(str, own["token"])),
        "total": int(table["position"].max()) + 1,
        "heads": list(map(int, own["heads_all"].iloc[0])),
        "sizes": sizes,
    }


def save_check(run: Run, path: Path) -> Path:
    """Write the picture of measured against predicted divergence, log-log, with the diagonal."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDE * 0.7, 3.4), layout="constrained")
        ax = figure.subplots()
        for chart in _checked(run):
            draw_chart(chart, ax=ax)
        if not ax.lines:
            say(ax, "nothing was predicted and measured above 0")
        save_figure(figure, path)
    return path


def _lines(own: pd.DataFrame, x: str, y: str, ends: tuple[str, str] | None) -> list[dict[str, Any]]:
    """A line for each rule and split."""
    found = []
    for i, ((rule, split), part) in enumerate(own.groupby(["rule", "split"], sort=False)):
        part = part.sort_values(x)
        points = {"x": numbers(part[x]), "y": numbers(part[y])}
        if ends is not None:
            points |= {"low": numbers(part[ends[0]]), "high": numbers(part[ends[1]])}
        label = str(rule) if split in ("uniform", "cut") else f"{rule}, {split}"
        dash = "solid" if i < COLORS else "dashed"
        found.append({"label": label, "color": i % COLORS, "dash": dash, **points})
    return found


def _metrics(run: Run) -> list[dict[str, Any]]:
    """A chart for each metric against the share of the cache, with intervals over texts."""
    table = read_table(run, "compress")
    if table is None or "share" not in table:
        return []
    own, columns, charts = table[table["rule"] != "full"], run.columns("compress"), []
    for key in SHOWN:
        if key in own and own[key].notna().any():
            log = key in ("kl", "error") and bool((own[key] > 0).all())
            axes = {
                "x": {"label": columns["share"].label, "log": True},
                "y": {"label": columns[key].label, "log": log},
            }
            series = _lines(own[own[key].notna()], "share", key, columns[key].ends)
            note = f"{columns[key].help} With 95 % intervals over texts."
            title = f"{columns[key].label} against the share of the cache"
            charts.append({"title": title, "note": note, **axes, "series": series})
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
    series = [row | {"mode": "points"} for row in _lines(own, "kl_predicted", "kl", None)]
    series.append({"label": "predicted = measured", "color": 7, "x": ends, "y": ends})
    axes = {
        "x": {"label": "predicted KL, nats per token", "log": True},
        "y": {"label": "measured KL, nats per token", "log": True},
    }
    note = (
        "Predicted from the exact errors of all heads at the decoded tokens and their Fisher"
        " metric, no constant fitted. Second order: right below about 0.2 nats."
    )
    return [{"title": "Predicted against measured loss", "note": note, **axes, "series": series}]
