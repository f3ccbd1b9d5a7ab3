"""Claims on the store: what is measured is reused, verdicts are kept as they come, what is missing
is said.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from esscher.cli.app import main
from esscher.papers import judge as judging
from esscher.papers.claim import Claim, Decision, Picture, Series
from esscher.papers.judge import folder_of, judge, read_verdicts, register, units
from esscher.runs import RunError, list_runs
from esscher.runs.run import LOCK
from esscher.runs.store import held

OUTSIDE = "my_claim:TAIL"


@pytest.fixture
def claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Claim:
    """The claim of outside_claim.py, as a user's own module."""
    folder = tmp_path / "mine"
    folder.mkdir()
    source = Path(__file__).with_name("outside_claim.py").read_text("utf-8")
    (folder / "my_claim.py").write_text(source, "utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))  # of worker processes
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(judging, "CLAIMS", {})
    return register(OUTSIDE)


def tried(claims: list[Claim], folder: Path, seed: int = 0, workers: int = 1) -> dict[str, Any]:
    return judge(claims, "quick", seed, folder, {"workers": workers})


def test_a_verdict_is_written_with_all_that_belongs_to_it(claim: Claim, tmp_path: Path) -> None:
    found = tried([claim], tmp_path / "out")
    [record] = found["claims"]
    assert record["verdict"] == "supported"
    assert record["low"] < 0.5 < record["high"]
    assert record["settings"]["own"]["claim"] == OUTSIDE
    assert record["command"] == "esscher reproduce o-100-half --quick"
    assert read_verdicts(tmp_path / "out") == json.loads(json.dumps(found))


def test_what_was_measured_is_reused(claim: Claim, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    first = tried([claim], folder)
    [run] = list_runs(tmp_path / "out")
    stamp = (run.path / "evidence.parquet").stat().st_mtime_ns
    # the same run, asked for by another claim
    other = replace(claim, id="o-101-again", measure=None)
    both = tried([other], folder)
    assert [record["id"] for record in both["claims"]] == ["o-100-half", "o-101-again"]
    assert both["claims"][0] == first["claims"][0]
    assert (run.path / "evidence.parquet").stat().st_mtime_ns == stamp
    assert both["claims"][1]["value"] == both["claims"][0]["value"]


def test_workers_find_the_same(claim: Claim, tmp_path: Path) -> None:
    one = tried([claim], tmp_path / "one")["claims"][0]
    two = tried([claim], tmp_path / "two", workers=2)["claims"][0]
    assert one["value"] == two["value"]
    assert one["value"] != tried([claim], tmp_path / "three", seed=1)["claims"][0]["value"]


def test_a_run_that_another_command_is_at_is_no_verdict(claim: Claim, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    run = folder_of(folder, claim.runs("quick", 0)["own"])
    run.mkdir(parents=True)
    with held(run / LOCK), pytest.raises(RunError, match="writing this run"):
        tried([claim], folder)
    assert read_verdicts(folder) is None


def test_what_cannot_be_tested_here_says_why(claim: Claim, tmp_path: Path) -> None:
    def measure(draws: int, rng: Any) -> Any:
        raise ValueError("smollm2: not installed; pip install it")

    lacking = replace(claim, measure=measure)
    judging.CLAIMS[OUTSIDE] = lacking
    [record] = tried([lacking], tmp_path / "out")["claims"]
    assert record["verdict"] == "undecided"
    assert record["value"] is None
    assert "not installed" in record["reason"]


def test_ctrl_c_keeps_earlier_verdicts(claim: Claim, tmp_path: Path) -> None:
    tried([claim], tmp_path / "out")

    def stop(tables: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tried([replace(claim, id="o-102-stop", decide=stop)], tmp_path / "out")
    kept = read_verdicts(tmp_path / "out")
    assert kept is not None
    assert [record["id"] for record in kept["claims"]] == ["o-100-half"]


def test_a_damaged_file_of_verdicts_is_named(tmp_path: Path) -> None:
    (tmp_path / "reproduce.json").write_text('{"claims": [1]}')
    with pytest.raises(RunError, match="remove it, and the verdicts are found again"):
        read_verdicts(tmp_path)


def test_the_file_of_a_run_cannot_name_code(claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = claim.runs("quick", 0)["own"]
    monkeypatch.setattr(judging, "CLAIMS", {})
    with pytest.raises(ValueError, match="not registered"):
        list(units(spec))  # type: ignore[arg-type]


def test_the_command(claim: Claim, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(["reproduce", OUTSIDE, "--json", "--out", "here"])
    printed = capsys.readouterr()
    assert json.loads(printed.out)["claims"][0]["verdict"] == "supported"
    assert "my_claim" not in printed.err.splitlines()[-1]
    said(["reproduce", OUTSIDE, "--out", "here"])
    printed = capsys.readouterr()
    assert printed.out.startswith("1 supported: here/reproduce.json\n")


def test_a_picture_with_open_ends_is_stored(claim: Claim, tmp_path: Path) -> None:
    """An interval without end is null in the file."""

    def decide(tables: Any) -> Decision:
        picture = Picture(
            "x",
            "y",
            (
                Series(
                    "s", [1.0, 2.0], [1.0, float("nan")], [0.5, float("-inf")], [2.0, float("inf")]
                ),
            ),
        )
        return replace(claim.decide(tables), picture=picture)

    found = tried([replace(claim, decide=decide)], tmp_path / "out")
    assert found["claims"][0]["picture"]["series"][0]["high"] == [2.0, None]


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    said(["reproduce", "--json"])
    listed = json.loads(capsys.readouterr().out)
    assert listed[0]["id"] == "b-1-sub-parametric"
    said(["reproduce"])
    assert "b-1-sub-parametric" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["reproduce", "b-99"], "claim: expected an id or a number that esscher reproduce lists"),
        (["reproduce", "--all", "1"], "--all: takes every claim"),
        (["reproduce", "no.such:THING"], "claim: no.such:THING cannot be imported"),
        (["reproduce", "json:dumps"], "claim: expected module:NAME of a Claim, got 'json:dumps'"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said(arguments, 2)
    printed = capsys.readouterr().err
    assert line in printed
    assert printed.count("\n") == 1


def said(arguments: list[str], code: int = 0) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == code
