"""Tails of the tokens that enter a layer: sinks apart from text, states that merge and are stored,
words that agree.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from esscher.probe import measure
from esscher.probe.measure import LAYERS, pack, unpack
from esscher.probe.statistic import STORED, LayerInfo, LayerMoments, LayerSummary, Rows

D, WINDOW, WINDOWS = 96, 256, 32
INFO = LayerInfo(0, 1, 1, 1.0, None, "")


def hidden() -> tuple[Tensor, Tensor]:
    """Text of bounded coordinates in windows; the first token of each has one coordinate like those
    of trained models.
    """
    generator = torch.Generator().manual_seed(21)
    tokens = torch.rand(WINDOWS, WINDOW, D, generator=generator)
    tokens[:, 0, 7] = 20.0 * torch.exp(0.7 * torch.randn(WINDOWS, generator=generator))
    return tokens.flatten(0, 1), torch.arange(WINDOW).repeat(WINDOWS)


def rows(part: slice = slice(None), sinks: bool = True, known: bool = True) -> Rows:
    tokens, positions = hidden()
    few, first = tokens[None, part, :4], positions[part] == 0
    whole = tokens[part] if known else None
    return Rows(few, few, few, whole, positions[part], first & sinks, 0 * positions[part])


def layer_row(found: LayerMoments) -> dict[str, Any]:
    return measure.layer_row(LayerSummary.of(INFO, found, None))


def test_first_tokens_make_a_tail_that_text_has_not() -> None:
    row = layer_row(LayerMoments.of(rows()))
    assert row["coordinate_tail"] == "Pareto"
    assert {row["coordinate_tail_text"], row["norm_tail_text"]} <= {"sub-Gaussian", "undecided"}
    assert f"Without first and special tokens, {row['coordinate_tail_text']}" in row["reason"]
    assert row["verdict"] == "heavier"
    assert list(row) == [column.key for column in LAYERS]
    told = {column.key: column.words for column in LAYERS if column.words}
    assert all(row[key] in words for key, words in told.items())


def test_parts_merge_and_are_stored() -> None:
    whole = LayerMoments.of(rows())
    first, *others = (
        LayerMoments.of(rows(slice(*part)))
        for part in ((0, 0), (3000, None), (0, 1000), (1000, 3000))
    )
    classes = {kind.__name__: kind for kind in STORED}
    for other in others:
        first = first.merge(unpack(pack(other), classes))
    found, expected = layer_row(first), layer_row(whole)
    for key, value in expected.items():
        close = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
        assert found[key] == close, key


def test_text_alone_is_not_heavier() -> None:
    row = layer_row(LayerMoments.of(rows(slice(1, WINDOW), sinks=False)))
    assert {row["norm_tail"], row["coordinate_tail"]} <= {"sub-Gaussian", "undecided", "unknown"}
    assert row["verdict"] != "heavier"


def test_a_layer_whose_input_is_not_known() -> None:
    row = layer_row(LayerMoments.of(rows(known=False)))
    assert row["norm_tail"] == row["verdict"] == "unknown"
    assert row["reason"] == ""
    assert math.isnan(row["norm_shape"])
