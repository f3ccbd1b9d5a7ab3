"""The tables of runs on the terminal: headers and intervals from the columns; columns that give way where there is no room."""

from __future__ import annotations

import math

import pytest

from esscher.cli.tables import Shown, fitting, show_table, shown
from esscher.runs import Column

BETA = Column("beta", "float", "measured exponent", "Help.", short="exponent", ends=("low", "high"))
ROWS = [{"beta": 0.5, "low": 0.25, "high": 0.75}, {"beta": math.nan, "low": math.nan, "high": math.nan}]


def test_headers_and_intervals_are_those_of_the_column() -> None:
    assert shown(BETA, ROWS, ".2f") == Shown("exponent", ("0.50 [0.25, 0.75]", "-"))
    assert shown(Column("w", "word", "regime", "Help."), [{"w": "frozen"}]) == Shown("regime", ("frozen",), words=True)


def test_the_column_that_matters_least_goes_first_and_some_never_go() -> None:
    columns = [Shown("head", ("0.1",)), Shown("a" * 10, ("1",), gives_way=1), Shown("b" * 10, ("2",), gives_way=2)]
    assert fitting(columns, None) == columns
    assert fitting(columns, 28) == columns
    assert fitting(columns, 27) == columns[:2]
    assert fitting(columns, 15) == columns[:1]
    assert fitting(columns, 1) == columns[:1]


def test_a_table_in_a_narrow_place(capsys: pytest.CaptureFixture[str]) -> None:
    show_table("title", [Shown("head", ("0.1",), words=True), Shown("wide column", ("1",), gives_way=1)], width=10)
    out = capsys.readouterr().out
    assert "0.1" in out
    assert "wide" not in out
