"""States of layers come back from their bytes as they were, and nothing else is made of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from esscher.errors import grid as deposit
from esscher.errors.grid import Deposit, Grid
from esscher.probe.measure import HeadState, LayerState, pack, unpack
from esscher.probe.statistic import LayerInfo, LayerMoments, Statistic


@dataclass(frozen=True)
class Leaf:
    rows: torch.Tensor
    number: float


class Leaves(Statistic):
    name = "leaves"
    state = (Leaf,)


def layer(state: Any) -> LayerState:
    few = torch.randn(1, 9, 4)
    numbers = torch.arange(3)
    head = HeadState({"leaves": state}, {}, numbers, numbers[:0], numbers)
    info = LayerInfo(3, 2, 1, 0.5, None, "é")
    return LayerState(info, LayerMoments.of(few, few, None), None, {0: head, 1: "why"})


def test_everything_comes_back() -> None:
    shared = torch.randn(3, 4, dtype=torch.float64)
    given = layer(Leaf(shared.T, 1e-310))
    again = unpack(pack(given), [Leaves()])
    assert again.info == given.info
    assert again.heads[1] == "why"
    head = again.heads[0]
    assert isinstance(head, HeadState)
    assert torch.equal(head.states["leaves"].rows, shared.T)
    assert head.states["leaves"].number == 1e-310
    assert torch.equal(again.moments.pair.scatter, given.moments.pair.scatter)
    assert again.moments.pair.count == 9


def test_deposits_known_to_float32_are_stored_as_that_and_come_back_wide() -> None:
    sizes = []
    for tol in (1e-6, 1e-10):
        state = deposit.init(3, Grid(1 / 8, 4, tol), torch.zeros(2, dtype=torch.float64))
        state = deposit.update(state, torch.randn(3, 900), torch.randn(900, 2))
        deposit.finish(state, torch.tensor([4]).numpy(), "replacement")  # what it caches stays
        data = pack(layer(state))
        (head, _) = unpack(data, []).heads.values()
        assert isinstance(head, HeadState)
        again = head.states["leaves"]
        assert isinstance(again, Deposit)
        assert again.grid == state.grid
        assert again.cells.dtype == torch.float64
        assert torch.equal(again.cells, state.cells.float().double() if tol > 1e-8 else state.cells)
        sizes.append(len(data))
    assert sizes[0] < 0.8 * sizes[1]


def test_a_class_that_was_not_named_is_not_made() -> None:
    with pytest.raises(KeyError, match="Leaf"):
        unpack(pack(layer(Leaf(torch.zeros(1), 1.0))), [])
    with pytest.raises(TypeError, match=r"heads\.0\.states\.leaves: expected a dataclass"):
        pack(layer(print))
