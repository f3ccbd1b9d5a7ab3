"""The tables of a downstream run: values of single draws, then means over texts with their
intervals.

Texts are what varies: values of several draws of one text, each of one draw alone, are averaged
first, and intervals (:mod:`esscher.intervals`) are over texts. Every rule reads the same texts, so
that rules are compared by differences on each text: texts differ more than rules do. Tertiles of
the texts' horizon are those of the full model, fixed before any key goes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from esscher.compress.metrics import READINGS, Reading
from esscher.compress.predicted import PREDICTORS, agreement_of, rank_correlation
from esscher.compress.spec import DownstreamSpec
from esscher.intervals import mean_interval, share_interval
from esscher.probe.budget import SHARE
from esscher.runs.columns import Column, Declared

FULL = "full"  # in place of a rule: the model on all keys
EVERY, TERTILES = "all", ("low", "middle", "high")
FEWEST = 6  # texts from which on tertiles are told
FINAL = "output"  # in place of a layer's number, among exponents: the model's last word
BY_NAME = {reading.name: reading for reading in READINGS}
ADDED, BEHIND = (
    ("added", "added_low", "added_high"),
    ("behind", "behind_low", "behind_high"),
)
CELL = ["rule", "split", "size"]


def finished(spec: DownstreamSpec, raw: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """downstream, layers, depth, propagation, sensitivity and correlations, as far as there is
    anything to say.
    """
    found: dict[str, pd.DataFrame] = {}
    draws = raw.get("draws")
    if draws is not None:
        found["draws"] = draws
        found["downstream"] = _summary(draws)
    if "layers" in raw:
        found["layers"] = _layers(raw["layers"])
    if draws is not None and len(depth := _exponents(draws, raw.get("layers"))):
        found["depth"] = depth
    if "propagation" in raw:
        found["propagation"] = _means(
            raw["propagation"], ["rule", "size", "layer"], ["error", "first_order", "kl"]
        )
    if "fixed" in raw:
        found["fixed"] = raw["fixed"]
        found["agreement"] = agreement_of(raw["fixed"])
    if "together" in raw:
        found["together"] = raw["together"]
    if "sensitivity" in raw:
        found["sensitivity"] = _means(
            raw["sensitivity"], ["layer", "head", "kv_head", "rule", "size"], ["kl", *PREDICTORS]
        )
        found["correlations"] = _correlations(found["sensitivity"], spec.seed)
    return found


def tertiles(horizons: pd.Series) -> pd.Series:
    """The third of each text by its horizon, equal numbers in each."""
    order = horizons.rank(method="first") - 1
    return (order * len(TERTILES) // len(horizons)).astype(int).map(dict(enumerate(TERTILES)))


def _summary(draws: pd.DataFrame) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    for name, own in draws.groupby("reading", sort=False):
        horizons = own.groupby("text")["horizon"].first()
        third = tertiles(horizons)
        texts = (
            own.groupby([*CELL, "text"], sort=False)
            .agg(
                value=("value", "mean"),
                kept=("kept", "mean"),
                keys=("keys", "first"),
                draws=("draw", "nunique"),
            )
            .reset_index()
        )
        thirds = TERTILES if len(horizons) >= FEWEST else ()
        groups = {
            group: texts if group == EVERY else texts[texts["text"].map(third) == group]
            for group in (EVERY, *thirds)
        }
        values = {
            group: some.pivot(index=CELL, columns="text", values="value")
            for group, some in groups.items()
        }
        for cell, members in texts.groupby(CELL, sort=False):
            for group, some in groups.items():
                part = some[(some[CELL] == list(cell)).all(axis=1)]
                rows.append(
                    dict(zip(CELL, cell, strict=True))
                    | {"horizon": group, "reading": name}
                    | _reading(BY_NAME[name], values[group], cell)
                    | {
                        "share": float(
                            (part["kept"] / part["keys"].where(part["keys"] > 0)).mean()
                        ),
                        "texts": len(part),
                        "draws": int(members["draws"].max()),
                    }
                )
    return pd.DataFrame(rows)


def _reading(reading: Reading, values: pd.DataFrame, cell: tuple[Any, ...]) -> dict[str, float]:
    """The mean of a cell with its interval; of a reading in nats also differences on the same
    texts, to the full model and to the best cell of this size.

    ``values``: a row for each cell, a column for each text.
    """
    own = values.loc[cell].dropna()
    interval = (
        share_interval(float(own.sum()), len(own))
        if reading.binary
        else mean_interval(own, least=reading.least, most=reading.most)
    )
    found = dict(zip(("value", "low", "high"), interval, strict=True))
    differences = dict.fromkeys((*ADDED, *BEHIND), math.nan)
    if reading.paired and cell[0] != FULL:
        alike = values[values.index.get_level_values("size") == cell[-1]]
        alike = alike[alike.index.get_level_values("rule") != FULL]
        best = alike.mean(axis=1).idxmin()
        full = (FULL, FULL, 1.0)
        # the divergence of the full model from itself is 0
        added = mean_interval(own - values.loc[full]) if full in values.index else interval
        behind = (0.0, math.nan, math.nan)
        if best != cell:
            behind = mean_interval((own - values.loc[best]).dropna())
        differences = dict(zip((*ADDED, *BEHIND), (*added, *behind), strict=True))
    return found | differences


def _layers(raw: pd.DataFrame) -> pd.DataFrame:
    """Over texts, draws of a text averaged before."""
    return _means(raw, [*CELL, "layer"], ["fixed", "independent", "inputs"])


def _means(raw: pd.DataFrame, keys: list[str], values: list[str]) -> pd.DataFrame:
    """Means over texts, and of the first value, which is never negative, its interval."""
    texts = raw.groupby([*keys, "text"], sort=False)[values].mean().reset_index()
    rows = []
    for place, own in texts.groupby(keys, sort=False):
        row = dict(zip(keys, place, strict=True)) | {
            name: float(own[name].mean()) for name in values
        }
        _, low, high = mean_interval(own[values[0]], least=0.0)
        rows.append(row | {"low": low, "high": high, "texts": len(own)})
    return pd.DataFrame(rows)


def _exponents(draws: pd.DataFrame, layers: pd.DataFrame | None) -> pd.DataFrame:
    """Of each rule and split: how fast the final error falls with the keys kept, and that of each
    layer's attention.
    """
    parts = [
        draws[draws["reading"] == "error"].assign(layer=FINAL, error=lambda rows: rows["value"])
    ]
    if layers is not None:
        parts.append(layers.assign(layer=layers["layer"].astype(str), error=layers["fixed"]))
    every = pd.concat(
        [part[["text", "draw", *CELL, "kept", "layer", "error"]] for part in parts],
        ignore_index=True,
    )
    rows = []
    for (rule, split, layer), own in every.groupby(["rule", "split", "layer"], sort=False):
        slopes = [slope for _, text in own.groupby("text") if math.isfinite(slope := _slope(text))]
        if slopes:
            mean, low, high = mean_interval(slopes)
            place = {"rule": rule, "split": split, "layer": layer}
            rows.append(place | {"exponent": mean, "low": low, "high": high, "texts": len(slopes)})
    return pd.DataFrame(rows)


def _slope(rows: pd.DataFrame) -> float:
    """Exponent b of error ~ kept^-b by least squares in logarithms, over the sizes of one text."""
    means = rows.groupby("size")[["kept", "error"]].mean()
    means = means[(means["error"] > 0) & (means["kept"] > 0)]
    if len(means) < 3 or means["kept"].nunique() < 3:
        return math.nan
    return -float(np.polyfit(np.log(means["kept"]), np.log(means["error"]), 1)[0])


def _correlations(heads: pd.DataFrame, seed: int) -> pd.DataFrame:
    rows = []
    for (rule, size), own in heads.groupby(["rule", "size"], sort=False):
        for name in PREDICTORS:
            rho, low, high = rank_correlation(own[name].to_numpy(), own["kl"].to_numpy(), seed)
            rows.append(
                {
                    "rule": rule,
                    "size": size,
                    "predictor": name,
                    "rho": rho,
                    "low": low,
                    "high": high,
                    "heads": len(own),
                }
            )
    return pd.DataFrame(rows)


# ---- What the columns of a downstream run's tables are, in words.

RULE = Column(
    "rule",
    "word",
    "keep rule",
    "Keep rule, as esscher.keep writes it; full: the model on all keys.",
)
SPLIT = Column(
    "split",
    "word",
    "split",
    "How many keys each head keeps: the same share of its cache (uniform), by one cut over all"
    " heads, or by a budget.",
)
SIZE = Column(
    "size",
    "float",
    "size asked",
    "What was asked for: a share of the cache, or keys of a key-value head on average.",
    "log",
)
LOW = Column("low", "float", "lower end", "Lower end of the 95 % interval over texts.")
HIGH = Column("high", "float", "upper end", "Upper end of the 95 % interval over texts.")
TEXTS = Column("texts", "int", "texts", "Number of texts.")
TEXT = Column("text", "int", "text", "Number of the text, from 0.")
LAYER = Column("layer", "int", "layer", "Layer, from 0; -1: keys are dropped in all layers.")
ENDS = ("low", "high")
READ = Column(
    "reading",
    "word",
    "reading",
    "What is read off the model.",
    words=tuple(reading.name for reading in READINGS),
    meanings=tuple(reading.help for reading in READINGS),
)
KL = Column(
    "kl",
    "float",
    "divergence",
    "Divergence of the next token when only this head, or layer, drops keys, in nats.",
    "log",
)
CELL_COLUMNS = (RULE, SPLIT, SIZE)

TABLES: Declared = {
    "draws": (
        TEXT,
        Column(
            "horizon",
            "float",
            "horizon of the text",
            "Median over heads of the two-sided horizon on this text.",
        ),
        *CELL_COLUMNS,
        Column("draw", "int", "draw", "Number of the draw, where chance decides."),
        Column(
            "kept",
            "float",
            "keys kept",
            "Keys kept of a key-value head, on average; where every query keeps a few, by a query.",
            "log",
        ),
        Column(
            "keys",
            "float",
            "keys held",
            "Keys that the cache of a key-value head holds, on average; where every query keeps a"
            " few, keys that a query sees.",
        ),
        READ,
        Column("value", "float", "value", "What was read on this text, of this draw alone."),
    ),
    "downstream": (
        *CELL_COLUMNS,
        Column("share", "float", "share of the cache", SHARE, "log"),
        Column(
            "horizon",
            "word",
            "horizon third",
            "Texts of which third, by their horizon on the full model; all: every text.",
        ),
        READ,
        Column(
            "value",
            "float",
            "mean",
            "Mean over the texts, draws of a text averaged before.",
            ends=ENDS,
        ),
        LOW,
        HIGH,
        Column(
            "added",
            "float",
            "added",
            "Loss or divergence, less the full model's on the same text; mean over the texts, in"
            " nats.",
            ends=("added_low", "added_high"),
        ),
        Column("added_low", "float", "its lower end", "Lower end of its 95 % interval."),
        Column("added_high", "float", "its upper end", "Upper end of its 95 % interval."),
        Column(
            "behind",
            "float",
            "behind the best",
            "Loss or divergence, less that of the best rule at this size on the same text; mean"
            " over the texts, in nats. Best: the smallest mean on these texts, so that rules close"
            " to it look slightly worse than they are.",
            ends=("behind_low", "behind_high"),
        ),
        Column("behind_low", "float", "its lower end", "Lower end of its 95 % interval."),
        Column("behind_high", "float", "its upper end", "Upper end of its 95 % interval."),
        TEXTS,
        Column("draws", "int", "draws", "Draws of each text."),
    ),
    "layers": (
        *CELL_COLUMNS,
        LAYER,
        Column(
            "fixed",
            "float",
            "error of attention",
            "Relative error of a layer at the full model's inputs, behind W_O.",
            ends=ENDS,
        ),
        Column(
            "independent",
            "float",
            "if heads were independent",
            "The same from the summed squares of its heads' errors.",
        ),
        Column(
            "inputs",
            "float",
            "error of inputs",
            "Relative error of what enters the layer's attention.",
        ),
        LOW,
        HIGH,
        TEXTS,
    ),
    "depth": (
        RULE,
        SPLIT,
        Column(
            "layer",
            "word",
            "layer of the error",
            "Layer whose attention error it is of; output: the model's last word.",
        ),
        Column(
            "exponent",
            "float",
            "exponent",
            "b of error ~ keys^-b over the sizes, mean over texts.",
            ends=ENDS,
        ),
        LOW,
        HIGH,
        TEXTS,
    ),
    "propagation": (
        RULE,
        SIZE,
        LAYER,
        Column(
            "error",
            "float",
            "change of the logits",
            "Relative change of the logits when this layer drops keys.",
            "log",
            ends=ENDS,
        ),
        Column(
            "first_order",
            "float",
            "first order",
            "The same by Jacobian-vector products of its heads' errors.",
            "log",
        ),
        KL,
        LOW,
        HIGH,
        TEXTS,
    ),
    "sensitivity": (
        LAYER,
        Column("head", "int", "head", "Query head, from 0: it alone drops keys."),
        Column("kv_head", "int", "key-value head", "Key-value head that it reads."),
        RULE,
        SIZE,
        KL,
        *(
            Column(name, "float", name.replace("_", " "), text, "log")
            for name, text in PREDICTORS.items()
        ),
        LOW,
        HIGH,
        TEXTS,
    ),
    "together": (
        TEXT,
        RULE,
        SIZE,
        LAYER,
        Column(
            "subset",
            "word",
            "sets of keys",
            "Whether all heads of the layer keep one random set of keys, or each its own.",
        ),
        Column(
            "exact",
            "float",
            "exact error",
            "Relative error of what the layer adds to the stream, by integrals over pairs of"
            " heads.",
        ),
        Column("first_order", "float", "small errors", "The same to first order in the sums."),
        Column(
            "independent",
            "float",
            "independent heads",
            "Root of the summed mean squares of the heads alone.",
        ),
        Column(
            "measured",
            "float",
            "drawn",
            "Root mean square over draws at the same inputs.",
            ends=ENDS,
        ),
        Column("low", "float", "lower end", "Lower end of its 95 % interval over draws."),
        Column("high", "float", "upper end", "Upper end of its 95 % interval over draws."),
    ),
    "fixed": (
        TEXT,
        RULE,
        SIZE,
        LAYER,
        Column(
            "draws", "int", "draws", "Draws that were measured; a rule without chance needs one."
        ),
        Column(
            "predicted",
            "float",
            "predicted error",
            "Relative error of what the layer adds to the stream for two queries at the full"
            " model's inputs, by integrals over which keys are kept.",
        ),
        Column(
            "measured",
            "float",
            "measured error",
            "The same in the running model, where layers hand on full outputs.",
            ends=ENDS,
        ),
        Column("low", "float", "lower end", "Lower end of its 95 % interval over draws."),
        Column("high", "float", "upper end", "Upper end of its 95 % interval over draws."),
        Column(
            "common",
            "float",
            "predicted covariance",
            "Summed products of the errors of different heads behind W_O, over the squared size of"
            " what the layer adds.",
        ),
        Column(
            "common_measured",
            "float",
            "measured covariance",
            "The same in the running model, mean over draws.",
            ends=("common_low", "common_high"),
        ),
        Column(
            "common_low", "float", "its lower end", "Lower end of its 95 % interval over draws."
        ),
        Column(
            "common_high", "float", "its upper end", "Upper end of its 95 % interval over draws."
        ),
    ),
    "agreement": (
        RULE,
        SIZE,
        Column("layers", "int", "layers", "Layers, of every text."),
        Column(
            "inside",
            "int",
            "errors inside",
            "Of how many the predicted error lies in the interval of the measured one; without"
            " chance, differs by rounding.",
        ),
        Column("common", "int", "covariances inside", "The same of the heads' covariance."),
        Column(
            "apart",
            "float",
            "largest difference",
            "Largest relative difference of a predicted and a measured error.",
        ),
        Column("draws", "int", "draws", "Draws that were measured."),
    ),
    "correlations": (
        RULE,
        SIZE,
        Column(
            "predictor",
            "word",
            "predictor",
            "Column of the table sensitivity.",
            words=tuple(PREDICTORS),
        ),
        Column(
            "rho",
            "float",
            "rank correlation",
            "Spearman's, over heads, with the measured divergence.",
            ends=ENDS,
        ),
        Column("low", "float", "lower end", "Lower end of its 95 % interval, by resampling heads."),
        Column(
            "high", "float", "upper end", "Upper end of its 95 % interval, by resampling heads."
        ),
        Column("heads", "int", "heads", "Number of heads."),
    ),
}


def columns(spec: DownstreamSpec) -> Declared:
    """By table."""
    return TABLES
