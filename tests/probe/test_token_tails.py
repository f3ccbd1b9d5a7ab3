"""Tails of the tokens that enter a layer: states that merge and are stored, words that agree."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from esscher.probe import measure
from esscher.probe.measure import LAYERS, LayerState, pack, unpack
from esscher.probe.statistic import LayerInfo, LayerMoments
from esscher.tails import extremes

D, WINDOW, WINDOWS = 96, 256, 32
INFO = LayerInfo(0, 1, 1, 1.0, None, "")


def hidden() -> Tensor:
    """Text of bounded coordinates in windows; the first token of each has one coordinate like those
    of trained models.
    """
    generator = torch.Generator().manual_seed(21)
    tokens = torch.rand(WINDOWS, WINDOW, D, generator=generator)
    tokens[:, 0, 7] = 20.0 * torch.exp(0.7 * torch.randn(WINDOWS, generator=generator))
    return tokens.flatten(0, 1)


def moments(part: slice = slice(None), known: bool = True) -> LayerMoments:
    tokens = hidden()
    few, whole = tokens[None, part, :4], tokens[part] if known else None
    return LayerMoments.of(few, few, whole)


def layer_row(found: LayerMoments) -> dict[str, Any]:
    tails = None if found.extremes is None else extremes.finish(found.extremes)
    return measure.layer_row(LayerState(INFO, found, None, {}), tails)


def test_first_tokens_make_a_tail() -> None:
    row = layer_row(moments())
    assert row["coordinate_tail"] == "Pareto"
    assert row["verdict"] == "heavier"
    assert list(row) == [column.key for column in LAYERS]
    told = {column.key: column.words for column in LAYERS if column.words}
    assert all(row[key] in words for key, words in told.items())


def test_parts_merge_and_are_stored() -> None:
    whole = moments()
    first, *others = (
        moments(slice(*part)) for part in ((0, 0), (3000, None), (0, 1000), (1000, 3000))
    )
    for other in others:
        first = first.merge(unpack(pack(LayerState(INFO, other, None, {})), []).moments)
    found, expected = layer_row(first), layer_row(whole)
    for key, value in expected.items():
        close = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
        assert found[key] == close, key


def test_text_alone_is_not_heavier() -> None:
    row = layer_row(moments(slice(1, WINDOW)))
    assert {row["norm_tail"], row["coordinate_tail"]} <= {"sub-Gaussian", "undecided", "unknown"}
    assert row["verdict"] != "heavier"


def test_a_layer_whose_input_is_not_known() -> None:
    row = layer_row(moments(known=False))
    assert row["norm_tail"] == row["verdict"] == "unknown"
    assert row["reason"] == ""
    assert math.isnan(row["norm_shape"])
