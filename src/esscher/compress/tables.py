"""Tables of a compression run: numbers of single texts, then means over texts with intervals.

Draws of one text are averaged first; intervals are over texts. Every rule reads the same texts, so
that rules are also compared by their differences on each text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from esscher.compress.metrics import metrics
from esscher.compress.spec import REFIT
from esscher.hf.gradients import SECOND_ORDER
from esscher.intervals import mean_interval, share_interval
from esscher.probe.budget import KEPT
from esscher.runs.columns import Column, Declared

FULL = "full"  # in place of a rule: the model on all keys
OUTPUT = "output"  # in place of a layer: the logits, or the embedding
CELL = ["rule", "split", "keep"]
WANTED = -1.0  # in place of a share asked for, where a loss was
CHECKED = ("kl", "kl_low", "kl_high", "kl_predicted", "kl_cross")


def finished(
    raw: Mapping[str, pd.DataFrame], bytes_full: float, bytes_weights: float = 0.0
) -> dict[str, pd.DataFrame]:
    """The tables of a run from the rows of its units; bytes of the keys and values of a full cache,
    and of a weight for each key.
    """
    draws = raw["draws"]
    found = {"draws": draws, "compress": _summary(draws, bytes_full, bytes_weights)}
    if {"kl", "kl_predicted", "kl_cross"} <= set(found["compress"]):
        found["check"] = _checked(found["compress"])
    if "layers" in raw:
        found["layers"] = _means(raw["layers"], [*CELL, "layer"], ["error", "independent", "nats"])
    if len(depth := _exponents(draws, raw.get("layers"))):
        found["depth"] = depth
    if "sensitivity" in raw:
        keys = ["layer", "head", "kv_head", "rule", "keep"]
        values = ["kl", "relative", "plain", "first_order", "nats"]
        found["sensitivity"] = _means(raw["sensitivity"], keys, values)
    if "kinds" in raw:
        found["kinds"] = _means(raw["kinds"], [*CELL, "kind"], ["kept_share", "held_share"])
    for name in ("tokens", "together"):
        if name in raw:
            found[name] = raw[name]
    return found


def _checked(rows: pd.DataFrame) -> pd.DataFrame:
    """Predicted beside measured divergence, for each rule, split and size."""
    rows = rows[(rows["rule"] != FULL) & rows["kl"].notna()]
    ratio = rows["kl"] / rows["kl_predicted"].where(rows["kl_predicted"] > 0)
    found = rows[[*CELL, *CHECKED]].assign(
        ratio=ratio, second_order=rows["kl_predicted"] <= SECOND_ORDER
    )
    return found.sort_values("kl", ascending=False, kind="stable").reset_index(drop=True)


def _summary(draws: pd.DataFrame, bytes_full: float, bytes_weights: float) -> pd.DataFrame:
    """A row for each rule, split and size: every metric with its interval over the texts."""
    known = metrics()
    draws = draws.assign(keep=draws["keep"].fillna(WANTED))  # NaN is not found in an index
    texts = draws.groupby([*CELL, "text", "metric"], sort=False, dropna=False).agg(
        value=("value", "mean"), kept=("kept", "mean"), keys=("keys", "first")
    )
    values = {  # by metric: a row for each cell, a column for each text
        name: own["value"].unstack("text")
        for name, own in texts.groupby(level="metric", sort=False)
    }
    values = {name: table.droplevel("metric") for name, table in values.items()}
    rows: list[dict[str, Any]] = []
    for cell, own in texts.groupby(level=CELL, sort=False, dropna=False):
        row = dict(zip(CELL, cell, strict=True))
        row["keep"] = math.nan if cell[2] == WANTED else cell[2]
        share = float((own["kept"] / own["keys"].where(own["keys"] > 0)).mean())
        row |= {"share": share, "keys": float(own["kept"].mean())}
        weights = bytes_weights if cell[0].endswith(REFIT) and share < 1 else 0.0
        row |= {"bytes": share * (bytes_full + weights), "bytes_full": bytes_full}
        row["texts"] = own.index.get_level_values("text").nunique()
        for name, table in values.items():
            if cell in table.index:
                row |= _metric(known[name], table, cell)
        rows.append(row)
    return pd.DataFrame(rows)


def _metric(metric: Any, table: pd.DataFrame, cell: tuple[Any, ...]) -> dict[str, float]:
    own, name = table.loc[cell].dropna(), metric.name
    found = (
        share_interval(float(own.sum()), len(own))
        if metric.binary
        else mean_interval(own, least=metric.least, most=metric.most)
    )
    row = dict(zip((name, f"{name}_low", f"{name}_high"), found, strict=True))
    if not metric.paired or cell[0] == FULL:
        return row
    full = [index for index in table.index if index[0] == FULL]
    if full and name != "kl":
        added = mean_interval(own - table.loc[full[0]])
        row |= dict(zip(_named(f"{name}_added"), added, strict=True))
    alike = [i for i in table.index if i[0] != FULL and i[2] == cell[2]]
    best = table.loc[alike].mean(axis=1).idxmin()
    behind = (0.0, math.nan, math.nan)
    if best != cell:
        behind = mean_interval((own - table.loc[best]).dropna())
    return row | dict(zip(_named(f"{name}_behind"), behind, strict=True))


def _named(name: str) -> tuple[str, str, str]:
    return name, f"{name}_low", f"{name}_high"


def _means(raw: pd.DataFrame, keys: list[str], values: list[str]) -> pd.DataFrame:
    """Means over texts, and of the first value, which is never negative, its interval."""
    texts = raw.groupby([*keys, "text"], sort=False, dropna=False)[values].mean().reset_index()
    rows = []
    for place, own in texts.groupby(keys, sort=False, dropna=False):
        row = dict(zip(keys, place, strict=True)) | own[values].mean().to_dict()
        _, low, high = mean_interval(own[values[0]], least=0.0)
        rows.append(row | {"low": low, "high": high, "texts": len(own)})
    return pd.DataFrame(rows)


def _exponents(draws: pd.DataFrame, layers: pd.DataFrame | None) -> pd.DataFrame:
    """Of each rule and split: how fast the error of the output falls with the keys kept, and that
    of each layer's attention.
    """
    output = draws[draws["metric"] == "error"]
    parts = [output.assign(layer=OUTPUT, error=output["value"])]
    if layers is not None:
        parts.append(layers.assign(layer=layers["layer"].astype(str)))
    names = ["text", "draw", *CELL, "kept", "layer", "error"]
    every = pd.concat([part[names] for part in parts], ignore_index=True)
    rows = []
    for (rule, split, layer), own in every.groupby(["rule", "split", "layer"], sort=False):
        slopes = [slope for _, text in own.groupby("text") if math.isfinite(slope := _slope(text))]
        if slopes:
            mean, low, high = mean_interval(slopes)
            place = {"rule": rule, "split": split, "layer": layer}
            rows.append(place | {"exponent": mean, "low": low, "high": high, "texts": len(slopes)})
    return pd.DataFrame(rows)


def _slope(rows: pd.DataFrame) -> float:
    """b of error ~ kept^-b by least squares in logarithms, over the sizes of one text."""
    means = rows.groupby("keep")[["kept", "error"]].mean()
    means = means[(means["error"] > 0) & (means["kept"] > 0)]
    if means["kept"].nunique() < 3:
        return math.nan
    return -float(np.polyfit(np.log(means["kept"]), np.log(means["error"]), 1)[0])


# ---- columns

LOW = Column("low", "float", "lower end", "Lower end of the 95 % interval over texts.")
HIGH = Column("high", "float", "upper end", "Upper end of the 95 % interval over texts.")
TEXT = Column("text", "int", "text", "Number of the text, from 0.")
TEXTS = Column("texts", "int", "texts", "Number of texts.")
LAYER = Column("layer", "int", "layer", "Layer, from 0.")
ENDS = ("low", "high")
CELLS = (
    Column("rule", "word", "rule", "Eviction rule; full: the model on all keys."),
    Column("split", "word", "split", "How heads share the budget."),
    Column("keep", "float", "keep", "Share of the cache asked for.", "log"),
)
SHARE = (
    "Keys kept over keys that the cache holds, summed over layers and key-value heads; a"
    " sliding-window layer holds at most its window."
)


LABELS = {"kl_behind": "KL above the best rule", "loss_behind": "loss above the best rule"}


def _of_metric(name: str, help: str) -> tuple[Column, ...]:
    low, high = f"{name}_low", f"{name}_high"
    label = LABELS.get(name, name.replace("_", " ").replace("kl", "KL"))
    return (
        Column(name, "float", label, help, "log", ends=(low, high)),
        Column(low, "float", f"{label}, low", "Lower end of its 95 % interval over texts."),
        Column(high, "float", f"{label}, high", "Upper end of its 95 % interval over texts."),
    )


def columns(spec: Any) -> Declared:
    """The columns of every table of a compression run."""
    measured: list[Column] = []
    for name, metric in metrics().items():
        measured += _of_metric(name, metric.help)
        if metric.paired:
            what = metric.help.removesuffix(".")
            added = f"{what}; minus the full model's on the same texts."
            behind = (
                f"{what}; minus the best rule's at this size on the same texts. The best is chosen"
                " on these texts, so close rules look slightly worse than they are."
            )
            measured += (*_of_metric(f"{name}_added", added), *_of_metric(f"{name}_behind", behind))
    kept = Column("kept", "float", "keys kept", "Keys kept of a key-value head, on average.", "log")
    return {
        "draws": (
            TEXT,
            Column("horizon", "float", "horizon", "Median over heads of the horizon on this text."),
            *CELLS,
            Column("draw", "int", "draw", "Number of the draw, where chance decides."),
            kept,
            Column("keys", "float", "keys held", "Keys that the cache of a head holds."),
            Column("metric", "word", "metric", "Output metric."),
            Column("value", "float", "value", "Its value on this text, of this draw."),
        ),
        "compress": (
            *CELLS,
            Column("share", "float", "share of the cache", SHARE, "log", short="of the cache"),
            Column("keys", "float", "keys", kept.help),
            Column("bytes", "float", "bytes", "Bytes of the kept keys and values, and weights."),
            Column("bytes_full", "float", "bytes, full", "Bytes of the full cache."),
            TEXTS,
            *measured,
        ),
        "layers": (
            *CELLS,
            LAYER,
            Column(
                "error",
                "float",
                "error",
                "Relative error of what attention adds to the stream, at the full model's inputs.",
                ends=ENDS,
            ),
            Column("independent", "float", "independent", "The same if heads erred independently."),
            Column("nats", "float", "nats", "Predicted loss of the layer, nats per token.", "log"),
            LOW,
            HIGH,
            TEXTS,
        ),
        "depth": (
            *CELLS[:2],
            Column("layer", "word", "layer", "Layer whose attention errs; output: the logits."),
            Column("exponent", "float", "exponent", "b of error ~ keys^-b.", ends=ENDS),
            LOW,
            HIGH,
            TEXTS,
        ),
        "sensitivity": (
            LAYER,
            Column("head", "int", "head", "Query head, from 0: it alone is compressed."),
            Column("kv_head", "int", "kv head", "Key-value head that it reads."),
            CELLS[0],
            CELLS[2],
            Column("kl", "float", "KL", "Divergence of the next token, nats.", "log", ends=ENDS),
            Column("relative", "float", "relative error", "Error of its output over the output."),
            Column("plain", "float", "error", "Error of its output, root mean square."),
            Column("first_order", "float", "first order", "Change of log p of drawn next tokens."),
            Column("nats", "float", "nats", "Predicted by its Fisher metric, nats.", "log"),
            LOW,
            HIGH,
            TEXTS,
        ),
        "check": (
            *CELLS,
            *(column for column in measured if column.key in CHECKED),
            Column("ratio", "float", "measured / predicted", "kl over kl_predicted."),
            Column(
                "second_order",
                "bool",
                "second order holds",
                f"Whether the prediction is at most {SECOND_ORDER} nats, where it is trusted.",
            ),
        ),
        "kinds": (
            *CELLS,
            Column("kind", "word", "kind of token", "Of the token at the key's position."),
            Column(
                "kept_share", "float", "share of kept keys", "Over layers and heads.", ends=ENDS
            ),
            Column("held_share", "float", "share of all keys", "Of the keys the cache held."),
            LOW,
            HIGH,
            TEXTS,
        ),
        "tokens": (
            *CELLS,
            Column("draw", "int", "draw", "Number of the draw, where chance decides."),
            *KEPT,
        ),
        "together": (
            TEXT,
            CELLS[0],
            CELLS[2],
            LAYER,
            Column("subset", "word", "keys", "One random set of keys for all heads, or for each."),
            Column("exact", "float", "exact error", "Of the layer, relative, by integrals."),
            Column("independent", "float", "independent", "The same for independent heads."),
        ),
    }
