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

from esscher.intervals import mean_interval, share_interval
from esscher.models.downstream.fixed import agreement_of
from esscher.models.downstream.readings import READINGS, Reading
from esscher.models.downstream.sensitivity import PREDICTORS, rank_correlation
from esscher.models.downstream.spec import DownstreamSpec

__all__ = ["FULL", "finished"]

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
