"""The tables of runs on the terminal: headers and intervals from the columns; columns that give way
where there is no room.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from esscher.cli.output import Shown, fitting, show_table, shown
from esscher.runs import Column
from tests.cli.commands import run

BETA = Column("beta", "float", "measured exponent", "Help.", short="exponent", ends=("low", "high"))
ROWS = [
    {"beta": 0.5, "low": 0.25, "high": 0.75},
    {"beta": math.nan, "low": math.nan, "high": math.nan},
]


def test_headers_and_intervals_are_those_of_the_column() -> None:
    assert shown(BETA, ROWS, ".2f") == Shown("exponent", ("0.50 [0.25, 0.75]", "-"))
    assert shown(Column("w", "word", "regime", "Help."), [{"w": "frozen"}]) == Shown(
        "regime", ("frozen",), words=True
    )


def test_the_column_that_matters_least_goes_first_and_some_never_go() -> None:
    columns = [
        Shown("head", ("0.1",)),
        Shown("a" * 10, ("1",), gives_way=1),
        Shown("b" * 10, ("2",), gives_way=2),
    ]
    assert fitting(columns, None) == columns
    assert fitting(columns, 28) == columns
    assert fitting(columns, 27) == columns[:2]
    assert fitting(columns, 15) == columns[:1]
    assert fitting(columns, 1) == columns[:1]


COLUMNS = [
    Shown("head", ("0.1", "0.2", "1.0"), words=True),
    Shown("exponent", ("0.5", "-", "0.25"), key="beta", values=(0.5, math.nan, 0.25)),
    Shown(
        "why",
        (
            "because of all that is said here",
            "no",
            "a/path/that/is/much/too/long/for/any/column/but/stays/whole",
        ),
        words=True,
        wraps=True,
    ),
]


def test_sentences_wrap_between_words_and_paths_stay_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_table("a title that is longer than the table is wide", COLUMNS, width=40)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 40 for line in lines if "a/path" not in line)
    assert any(
        line.endswith("a/path/that/is/much/too/long/for/any/column/but/stays/whole")
        for line in lines
    )
    assert "0.1        0.5  because of all that is" in lines
    assert "                said here" in lines


def test_what_had_no_room_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    show_table("title", [COLUMNS[0], Shown("wide column", ("1", "2", "3"), gives_way=1)], width=12)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:4] == ["head", "0.1", "0.2"]
    assert "(no room for: wide column; a wider terminal" in " ".join(lines)


def test_rows_are_sorted_and_cut(capsys: pytest.CaptureFixture[str]) -> None:
    for sort, order in (
        ("beta", "1.0 0.1 0.2"),
        ("beta:down", "0.1 1.0 0.2"),
        ("exponent", "1.0 0.1 0.2"),
        ("head:down", "1.0 0.2 0.1"),
    ):
        show_table("title", COLUMNS[:2], {"sort": sort})
        assert [
            line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]
        ] == order.split()
    show_table("title", COLUMNS[:2], {"top": 1, "sort": "beta"})
    out, err = capsys.readouterr()
    assert out.splitlines()[2:] == ["1.0       0.25"]
    assert err == "the first 1 of 3 rows\n"
    with pytest.raises(
        ValueError,
        match="--sort: expected one of head, beta, with :down for the largest first, got 'colour'",
    ):
        show_table("title", COLUMNS[:2], {"sort": "colour"})


def test_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(
        "title",
        [COLUMNS[0], Shown("a|b", ("1", "2", "3"), gives_way=9)],
        {"markdown": True, "top": 2},
        width=5,
    )
    assert (
        capsys.readouterr().out
        == "title\n\n| head | a\\|b |\n| :-- | --: |\n| 0.1 | 1 |\n| 0.2 | 2 |\n\n"
    )


def test_commands_fit_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers and paths are whole: every word is one of the table that has all the room it
    wants.
    """
    monkeypatch.chdir(tmp_path)
    Path("quick.yaml").write_text(
        "job: converge\nlaw: {law: gaussian, dim: 2}\nsweep: {over: horizon, values: [0.3,"
        " 0.9]}\nn: 20,60,200\nrepeats: 24\nmetrics: [l2, mean]\nqueries: 4\n"
    )
    commands = (
        "predict --gaussian --dim 3 --horizon 1.5 --n 1e3:1e12",
        "predict --cube --dim 3 --n 1e3 --queries 8",
        "converge quick.yaml --out run --figures ",
        "fit run",
        "icl flow --lengths 10 --covariance isotropic --out flow --figures ",
        "icl risk --lengths 10,1000000 --covariance isotropic",
        "ls",
    )
    for command in commands:
        monkeypatch.delenv("COLUMNS", raising=False)
        code, wide, err = run(command.split(" "), capsys)
        assert code == 0, err
        monkeypatch.setenv("COLUMNS", "80")
        narrow = run(command.split(" "), capsys)[1]
        assert max(map(len, narrow.splitlines())) <= 80, narrow
        assert set(
            re.sub(r"\(no room for:.*?has them\)", "", narrow, flags=re.DOTALL).split()
        ) <= set(wide.split())


@pytest.mark.parametrize("law", ["--gaussian --horizon 1.5 --n 1e3", "--cube --n 1e3 --queries 8"])
def test_what_is_proved_is_said_at_any_width(
    law: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run(["predict", "--dim", "3", *law.split()], capsys)[1].splitlines()
    header = next(line.split() for line in lines if line.startswith("name "))
    assert header[:2] == ["name", "status"]
    assert header[-1] == "applies"
    told = {
        line.split()[0]: line.split()[1]
        for line in lines
        if line.startswith(("sharp-l2 ", "delta-bound "))
    }
    assert told == {"sharp-l2": "heuristic", "delta-bound": "proved"}


def test_summaries_stand_above_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    first = run(["predict", "--gaussian", "--dim", "3", "--horizon", "1.5", "--n", "1e3"], capsys)[
        1
    ].splitlines()
    assert first[0].startswith("error 0.")
    assert "falling like n^-0." in first[0]
    assert first[3].startswith("theory: ")
    flow = run(["icl", "risk", "--lengths", "10", "--covariance", "isotropic"], capsys)[
        1
    ].splitlines()
    assert (
        flow[0]
        == "isotropic, prompts of 10 tokens: mean squared error softmax 0.7089, linear 0.4939"
    )
