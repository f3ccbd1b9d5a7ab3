"""Ladders of n as people write them."""

from __future__ import annotations

import pytest

from esscher.inputs import parse_ladder


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100,1000", [100, 1000]),
        ("7", [7]),
        (12, [12]),
        ([1, 10.0], [1, 10]),
        ("10:1000:3", [10, 100, 1000]),
        ("1e3:1e4", [1000, 1778, 3162, 5623, 10000]),
        ("5:5", [5]),
    ],
)
def test_ladders(text: object, expected: list[int]) -> None:
    assert parse_ladder(text).tolist() == expected


@pytest.mark.parametrize(
    "text", ["", "a", "1:2:3:4", "10:5", "100,10", "0:10", "1.5", [3, 3], "nan", "1:10:0"]
)
def test_bad_ladders(text: object) -> None:
    with pytest.raises(ValueError, match="n"):
        parse_ladder(text)
