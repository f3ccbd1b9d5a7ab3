"""Tails of the tokens that enter a layer: sinks apart from text, states that merge and are stored,
words that agree.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from esscher.probe.layer import pack, unpack
from esscher.probe.tokens import TAIL_COLUMNS, LayerMoments, Rows, SplitExtremes, tail_row

D, WINDOW, WINDOWS = 96, 256, 32


def hidden() -> tuple[Tensor, Tensor]:
    """Text of bounded coordinates in windows; the first token of each has one coordinate like those
    of trained models.
    """
    generator = torch.Generator().manual_seed(21)
    tokens = torch.rand(WINDOWS, WINDOW, D, generator=generator)
    tokens[:, 0, 7] = 20.0 * torch.exp(0.7 * torch.randn(WINDOWS, generator=generator))
    return tokens.flatten(0, 1), torch.arange(WINDOW).repeat(WINDOWS)


def rows(part: slice = slice(None), special: Tensor | None = None) -> Rows:
    tokens, positions = hidden()
    few = tokens[None, part, :4]
    return Rows(few, few, few, positions[part], tokens[part], special)


def layer_row(found: LayerMoments, verdict: str = "sub-Gaussian") -> dict[str, Any]:
    assert found.extremes is not None
    return tail_row(found.extremes.finish(), verdict)


def test_first_tokens_make_a_tail_that_text_has_not() -> None:
    row = layer_row(LayerMoments.of(rows()))
    assert row["coordinate_tail"] == "Pareto"
    assert {row["coordinate_tail_text"], row["norm_tail_text"]} <= {"sub-Gaussian", "undecided"}
    assert (
        f"Without the {WINDOWS} first and special tokens, {row['coordinate_tail_text']}"
        in row["tail_reason"]
    )
    assert "By kurtosis the verdict is sub-Gaussian" in row["tail_reason"]
    assert set(row) == {column.key for column in TAIL_COLUMNS}
    told = {column.key: column.words for column in TAIL_COLUMNS if column.words}
    assert all(row[key] in words for key, words in told.items())


def test_special_tokens_are_sinks_wherever_they_stand() -> None:
    tokens, positions = hidden()
    special = positions == 0
    moved = Rows(
        tokens[None, :, :4],
        tokens[None, :, :4],
        tokens[None, :, :4],
        positions + 1,
        tokens,
        special,
    )
    assert layer_row(LayerMoments.of(moved)) == layer_row(LayerMoments.of(rows()))


def test_parts_merge_and_are_stored() -> None:
    whole = LayerMoments.of(rows())
    first, *others = (
        LayerMoments.of(rows(slice(*part)))
        for part in ((0, 0), (3000, None), (0, 1000), (1000, 3000))
    )
    for other in others:
        first = first.merge(unpack(pack(other), LayerMoments))
    found, expected = layer_row(first), layer_row(whole)
    for key, value in expected.items():
        assert found[key] == (
            pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
        ), key


def test_verdicts_do_not_differ_without_a_word() -> None:
    state = SplitExtremes.of(hidden()[0][1:WINDOW], torch.zeros(WINDOW - 1, dtype=torch.bool))
    tails = state.finish()
    assert {tails.whole.norms.verdict, tails.whole.coordinates.verdict} <= {
        "sub-Gaussian",
        "undecided",
        "unknown",
    }
    assert "By kurtosis the verdict is heavier" in tail_row(tails, "heavier")["tail_reason"]
    assert "By kurtosis" not in tail_row(tails, "sub-Gaussian")["tail_reason"]


def test_a_layer_whose_input_is_not_known() -> None:
    row = tail_row(None, "unknown")
    assert row["norm_tail"] == "unknown"
    assert row["tail_reason"] == ""
    assert math.isnan(row["norm_shape"])
