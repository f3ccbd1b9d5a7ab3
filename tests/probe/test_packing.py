"""Trees of dataclasses, mappings, tensors and plain values come back from their bytes as they
were.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from esscher.errors import grid as deposit
from esscher.errors.grid import Deposit, Grid
from esscher.probe.measure import pack, unpack
from esscher.tails import moments
from esscher.tails.moments import TokenMoments


@dataclass(frozen=True)
class Leaf:
    rows: torch.Tensor
    number: float


@dataclass(frozen=True)
class Tree:
    name: str
    count: int
    leaf: Leaf | None
    other: Leaf
    yes: bool


def tree(leaf: Leaf | None, number: float = 0.1) -> Tree:
    return Tree("é", 3, leaf, Leaf(torch.arange(5), number), True)


@pytest.mark.parametrize("number", [0.1, -0.0, math.inf, 1e-310])
def test_everything_comes_back(number: float) -> None:
    shared = torch.randn(3, 4, dtype=torch.float64)
    given = {
        "a": tree(Leaf(shared, number)),
        "b": tree(None, number),
        "c": None,
        "d": shared,
        "e": shared.T[:0],
    }
    data = pack(given)
    again = unpack(data, {"Tree": Tree, "Leaf": Leaf})
    assert list(again) == list(given)
    assert torch.equal(again["a"].leaf.rows, shared)
    assert again["a"].leaf.number == number
    assert (again["a"].name, again["a"].count, again["a"].yes) == ("é", 3, True)
    assert again["b"].leaf is None
    assert again["b"].other.rows.dtype == torch.int64
    assert again["c"] is None
    assert again["e"].shape == (0, 3)
    assert pack(again) == data


def test_half_of_a_symmetric_matrix_is_stored_and_all_of_it_comes_back() -> None:
    rows = torch.randn(3, 40, 40, dtype=torch.float64)
    alike = rows + rows.transpose(1, 2)
    almost = alike.clone()
    almost[2, 0, 1] = torch.nextafter(almost[2, 0, 1], almost.new_tensor(9.0))
    for given in (alike, almost, alike.bool(), alike[:, :1, :1]):
        assert torch.equal(unpack(pack({"a": given}), {})["a"], given)
    assert len(pack({"a": alike})) < 0.55 * len(pack({"a": almost}))


def test_moments_are_symmetric_to_the_last_digit_one_block_or_two() -> None:
    rows = torch.randn(2, 300, 37, dtype=torch.float64) + 3
    state = moments.init(37, (2,))
    for some in (rows[:, :170], rows[:, 170:]):
        state = moments.update(state, some)
        assert torch.equal(state.scatter, state.scatter.transpose(1, 2))


def test_deposits_known_to_float32_are_stored_as_that_and_come_back_wide() -> None:
    sizes, classes = [], {"Deposit": Deposit, "Grid": Grid}
    for tol in (1e-6, 1e-10):
        state = deposit.init(3, Grid(1 / 8, 4, tol), torch.zeros(2, dtype=torch.float64))
        state = deposit.update(state, torch.randn(3, 900), torch.randn(900, 2))
        again = unpack(pack(state), classes).cells
        assert again.dtype == torch.float64
        assert torch.equal(again, state.cells.float().double() if tol > 1e-8 else state.cells)
        sizes.append(len(pack(state)))
    assert sizes[0] < 0.7 * sizes[1]


def test_a_class_that_was_not_named_is_not_made() -> None:
    with pytest.raises(KeyError, match="Leaf"):
        unpack(pack({"a": Leaf(torch.zeros(1), 1.0)}), {})


def test_moments_come_back() -> None:
    generator = torch.Generator().manual_seed(1)
    state = moments.update(
        moments.init(3), torch.randn(50, 3, generator=generator, dtype=torch.float64)
    )
    again = unpack(pack(state), {"TokenMoments": TokenMoments})
    assert again.count == 50
    assert torch.equal(again.scatter, state.scatter)
    assert torch.equal(again.mean, state.mean)


def test_what_is_neither_is_refused_by_its_place() -> None:
    with pytest.raises(TypeError, match=r"a\.b: expected a dataclass.*got set"):
        pack({"a": {"b": {1}}})
