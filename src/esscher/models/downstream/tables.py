"""The tables of a downstream run: values of single draws, then means over texts with their
intervals.

Texts are what varies: values of several draws of one text, each of one draw alone, are averaged
first, and intervals are Student's over texts. Tertiles of the texts' horizon are those of the full
model, fixed before any key goes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from esscher.models.downstream.fixed import agreement_of
from esscher.models.downstream.interval import interval
from esscher.models.downstream.readings import READINGS
from esscher.models.downstream.sensitivity import PREDICTORS, rank_correlation
from esscher.models.downstream.spec import DownstreamSpec

__all__ = ["FULL", "finished"]

FULL = "full"  # in place of a rule: the model on all keys
EVERY, TERTILES = "all", ("low", "middle", "high")
FEWEST = 6  # texts from which on tertiles are told
FINAL = "output"  # in place of a layer's number, among exponents: the model's last word
BINARY = {reading.name for reading in READINGS if reading.binary}
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
    for reading, own in draws.groupby("reading", sort=False):
        horizons = own.groupby("text")["horizon"].first()
        third = tertiles(horizons)
        for cell, some in own.groupby(CELL, sort=False):
            texts = some.groupby("text").agg(
                value=("value", "mean"), kept=("kept", "mean"), keys=("keys", "first")
            )
            groups = {EVERY: texts} | {
                name: texts[third[texts.index] == name]
                for name in TERTILES
                if len(horizons) >= FEWEST
            }
            for name, members in groups.items():
                mean, low, high = interval(members["value"].to_numpy(), binary=reading in BINARY)
                kept = float((members["kept"] / members["keys"].where(members["keys"] > 0)).mean())
                place = dict(zip(CELL, cell, strict=True))
                counts = {
                    "share": kept,
                    "texts": len(members),
                    "draws": int(some["draw"].nunique()),
                }
                rows.append(
                    place
                    | {"horizon": name, "reading": reading, "value": mean, "low": low, "high": high}
                    | counts
                )
    return pd.DataFrame(rows)


def _layers(raw: pd.DataFrame) -> pd.DataFrame:
    """Over texts, draws of a text averaged before."""
    return _means(raw, [*CELL, "layer"], ["fixed", "independent", "inputs"])


def _means(raw: pd.DataFrame, keys: list[str], values: list[str]) -> pd.DataFrame:
    """Means over texts, and of the first value its interval."""
    texts = raw.groupby([*keys, "text"], sort=False)[values].mean().reset_index()
    rows = []
    for place, own in texts.groupby(keys, sort=False):
        row = dict(zip(keys, place, strict=True)) | {
            name: float(own[name].mean()) for name in values
        }
        _, low, high = interval(own[values[0]].to_numpy())
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
            mean, low, high = interval(np.array(slopes))
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
