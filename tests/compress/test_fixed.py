"""Predicted errors of layers at fixed inputs: which heads have their keys drawn together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from esscher.compress import predicted as fixed
from esscher.compress import predicted as together
from esscher.compress.text import Text
from tests.compress.runs import source

RULE = "sinks:2+random"


def test_heads_that_share_keys_are_drawn_together() -> None:
    """One group is one set for all heads, a group a head is a set each, as the integrals of heads
    together give them; and a cache has a group for each key-value head.
    """
    found = source("llama", rules=[RULE], dtype="float64")
    text = Text(found, found.ids(int(found.texts[0])), found.prefill, {})
    cell = next(text.cells())
    calls = {call.layer: call for call in text.calls}
    for number, layer in fixed._layers(text, cell):
        assert list(layer.groups) == [0, 0, 1, 1]
        exact = [one.exact() for one in together._queries(text, cell, calls[number])]
        wanted = {name: sum(one[name] for one in exact) for name in exact[0]}
        shared, alone = (
            replace(layer, groups=[0] * 4).squares(),
            replace(layer, groups=range(4)).squares(),
        )
        assert shared[0] == pytest.approx(wanted[together.SHARED], rel=1e-6)
        assert alone[0] == pytest.approx(wanted[together.ALONE], rel=1e-6)
        assert shared[1] == alone[1] == pytest.approx(wanted["independent"], rel=1e-6)
        assert len({round(one, 12) for one in (shared[0], alone[0], layer.squares()[0])}) == 3
