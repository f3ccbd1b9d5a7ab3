"""Which head and which layer a split serves worst: a good mean may hide both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from esscher.runs.columns import Column

__all__ = ["WORST", "worst_of"]

WORST = (
    Column(
        "worst",
        "float",
        "largest error",
        "Relative error of the head that has the largest.",
        short="worst",
    ),
    Column(
        "worst_head",
        "word",
        "worst head",
        "Layer and head of the largest error.",
        short="worst head",
    ),
    Column(
        "worst_layer_error",
        "float",
        "largest error of a layer",
        "Relative error of the layer that has the largest, over its heads together and without"
        " weights.",
        short="worst layer's error",
    ),
    Column(
        "worst_layer", "word", "worst layer", "Layer of the largest error.", short="worst layer"
    ),
)


def worst_of(squared: Mapping[tuple[int, int], tuple[float, float]]) -> dict[str, Any]:
    """The columns WORST. ``squared``: by layer and head, the squared error and the squared size
    that it is relative to.
    """
    heads: dict[str, tuple[float, float]] = {}
    layers: dict[str, tuple[float, float]] = {}
    for (layer, head), (error, size) in squared.items():
        heads[f"{layer}.{head}"] = (error, size)
        known = layers.get(str(layer), (0.0, 0.0))
        layers[str(layer)] = (known[0] + error, known[1] + size)
    head_error, worst_head = _largest(heads)
    layer_error, worst_layer = _largest(layers)
    return {
        "worst": head_error,
        "worst_head": worst_head,
        "worst_layer_error": layer_error,
        "worst_layer": worst_layer,
    }


def _largest(squared: Mapping[str, tuple[float, float]]) -> tuple[float, str]:
    """The largest relative error, and whose it is."""
    name = max(squared, key=lambda name: _relative(*squared[name]))
    return _relative(*squared[name]), name


def _relative(error: float, size: float) -> float:
    return 0.0 if error == 0 else math.sqrt(error / size) if size > 0 else math.inf
