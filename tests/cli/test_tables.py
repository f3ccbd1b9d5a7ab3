"""Tables on the terminal: headers, order and intervals from the columns; they fit 80 columns."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from esscher.cli.output import close, show
from esscher.runs import Column
from tests.cli.commands import run

COLUMNS = {
    "why": Column("why", "word", "why", "Help."),
    "beta": Column(
        "beta",
        "float",
        "measured exponent",
        "Help.",
        short="exponent",
        ends=("low", "high"),
        first=1,
    ),
    "head": Column("head", "word", "head", "Help.", first=0),
}
PATH = "a/path/that/is/much/too/long/for/any/column/but/stays/whole"
ROWS = [
    {"why": "because of all that is said here, and of more", "head": "0.1", "beta": 0.5},
    {"why": "no", "head": "0.2", "beta": math.nan},
    {"why": PATH, "head": "1.0", "beta": 0.25},
]
ROWS = [{**row, "low": row["beta"] / 2, "high": 2 * row["beta"]} for row in ROWS]  # type: ignore[operator]


def test_headers_order_and_intervals_are_those_of_the_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show("title", ROWS, COLUMNS)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "title"
    assert lines[1].split() == ["head", "exponent", "why"]
    assert lines[2].split()[:4] == ["0.1", "0.5", "[0.25,", "1]"]
    assert lines[3].split() == ["0.2", "-", "no"]


def test_sentences_wrap_between_words_and_paths_stay_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    show("title", [{"why": "word " * 30, "path": PATH}])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert sum(line.count("word") for line in lines) == 30
    assert any(line.endswith(PATH) for line in lines)


def test_a_short_table_fits_the_screen_and_says_what_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is little room the first interval stays, then the first columns."""
    columns = {
        key: Column(key, "float", key, "Help.", ends=(f"{key}_low", f"{key}_high"))
        for key in ("loss", "predicted", "added")
    }
    row = dict.fromkeys(columns, 0.123456)
    row |= {end: 0.0123456 for column in columns.values() for end in column.ends or ()}
    rows = [{"rule": "a rule with a name", **row}] * 20
    expected = {
        200: (8, "rule loss predicted added", 3),
        80: (7, "rule loss predicted added", 2),  # the sentence takes two lines
        50: (7, "rule loss", 1),
    }
    for width, (shown, header, intervals) in expected.items():
        monkeypatch.setenv("COLUMNS", str(width))
        close(["word " * 18], rows, ["rule", *columns], "go", columns, everything=False)
        lines = capsys.readouterr().out.splitlines()
        first = next(i for i, line in enumerate(lines) if line.startswith("rule "))
        assert lines[first].split() == header.split()
        assert {line.count("[") for line in lines[first + 1 : -2]} == {intervals}
        assert lines[-2:] == [f"{20 - shown} more rows: --all", "Next: go"]
        assert (len(lines), max(map(len, lines)) <= width) == (shown + first + 3, True)
        assert len(lines) <= 12


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
        "converge quick.yaml --out run",
        "fit run",
        "icl flow --lengths 10 --covariance isotropic --out flow",
        "icl length --epsilon .1 --covariance isotropic",
        "ls",
    )
    for command in commands:
        monkeypatch.delenv("COLUMNS", raising=False)
        code, wide, err = run(command.split(" "), capsys)
        assert code == 0, err
        monkeypatch.setenv("COLUMNS", "80")
        narrow = run(command.split(" "), capsys)[1]
        lines = [line for line in narrow.splitlines() if not line.startswith("Next: ")]
        assert max(map(len, lines)) <= 80, narrow  # a command to copy is not folded
        assert len(narrow.splitlines()) <= 12
        # the last line of a table that is cut has another number
        told = " ".join(line for line in lines if not line.endswith("rows: --all"))
        assert set(told.split()) <= set(wide.split())


def test_summaries_stand_above_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["predict", "--gaussian", "--dim", "3", "--horizon", "1.5", "--n", "1e3"]
    first = run(asked, capsys)[1].splitlines()
    assert first[0].startswith("At n = 1,000 the error is 0.")
    assert " and falls like n^-0." in first[0]
    assert ". A relative error of 0.1 is not reached; it is " in first[0]
    assert first[1] == "23 of 24 statements of theory apply (17 proved); at this n they say:"
    again = f"{' '.join(asked)} --figure error.svg"
    assert first[-2:] == ["16 more rows: --all", f"Next: esscher {again}"]
    narrow = run([*asked[:-1], "10"], capsys)[1]
    assert "; there a few keys have most of the weight. " in narrow
    asked = "icl flow --lengths 10 --covariance isotropic --out flow"
    flow = run(asked.split(), capsys)[1].splitlines()
    above = "isotropic, mean squared error above the Bayes predictor's: softmax 0.514 at 10 tokens;"
    assert flow[0] == f"{above} linear 0.299 at 10 tokens."
