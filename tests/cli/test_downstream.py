"""esscher downstream and budget --weights as users call them, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from esscher.compress.spec import DownstreamSpec
from esscher.report.page import content_of
from esscher.runs import load_run
from tests.cli.commands import run
from tests.compress.runs import folder
from tests.models.frontiers import CONSTANTS, frontier_run
from tests.report.atlas import store_run

ASKED = [
    "--texts",
    "2",
    "--window",
    "60",
    "--decode",
    "12",
    "--observe",
    "8",
    "--sizes",
    "0.3,0.5,0.7",
]


def test_a_run_its_tables_and_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, text = str(folder() / "llama"), str(folder() / "text.txt")
    more = ["--rules", "sinks:2+recent:4+impact", "--splits", "cut", "--sensitivity", "--depth"]
    code, out, _ = run(
        ["downstream", model, "--text", text, *ASKED, *more, "--out", str(tmp_path / "run")], capsys
    )
    assert code == 0
    for words in (
        "keep rule",
        "kl",
        "agreement",
        "loss added",
        "kl behind the best",
        "shares of the cache are keys kept over keys held, summed over layers",
        "rank correlation",
        "exponent",
        "first order",
    ):
        assert words in out
    stored = load_run(tmp_path / "run")
    page = content_of(stored)
    titles = [chart["title"] for chart in page["charts"]]
    assert titles[:1] == ["Reading: kl"] or "Reading: kl" in titles
    assert {"One layer at a time", "One head at a time: sensitive"} <= set(titles)
    assert {"Reading: loss, added", "Reading: kl, behind the best"} <= set(titles)
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    code, out, _ = run(["resume", str(tmp_path / "run"), "--json"], capsys)
    assert code == 0
    assert json.loads(out)["downstream"]  # it ends as its command does


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sizes", "0"], "sizes: expected shares above 0 and below 1"),
        (["--sizes", "x"], "sizes: expected numbers such as 0.05,0.1"),
        (["--rules", "nothing"], "no rule 'nothing'"),
        (["--text", "-"], "--text -: standard input can be read once"),
        (["--layers", "a"], "--layers: expected numbers such as 0,2-4"),
    ],
)
def test_bad_flags_end_in_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(["downstream", str(folder() / "llama"), *flags], capsys)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_budgets_by_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Heads of layer 0 count twenty times, by the probe's own gradients or by those of another run:
    it keeps more.
    """
    felt = {place: 20.0 if place[0] == 0 else 1.0 for place in CONSTANTS}
    stored = frontier_run(tmp_path / "probe", gradients=felt)
    rows = [
        {"layer": layer, "head": head, "plain": 1.0, "sensitive": felt[layer, head]}
        for layer, head in CONSTANTS
    ]
    elsewhere = str(store_run(tmp_path / "elsewhere", DownstreamSpec(), {"sensitivity": rows}).path)
    asked = ["budget", str(stored.path), "--rule", "heavy", "--total", "300"]
    found = {
        name: json.loads(run([*asked, "--json", *more], capsys)[1])
        for name, more in {
            "own": [],
            "none": ["--weights", "none"],
            "run": ["--weights", elsewhere],
        }.items()
    }
    kept = {name: [row["keys"] for row in one["caches"]] for name, one in found.items()}
    assert kept["own"] == kept["run"]
    assert sum(kept["own"][:2]) > 1.3 * sum(kept["none"][:2])
    assert sum(kept["own"]) == pytest.approx(300)
    assert {name: one["weights"] for name, one in found.items()} == {
        "own": "heads count by the gradient of log p",
        "none": "heads count alike",
        "run": f"heads count by the gradients of {elsewhere}",
    }
    for more in ([], ["--weights", "none"]):
        told = run([*asked, *more], capsys)[1]
        assert ("heads count by the gradient of log p" in told) == (not more)
    assert (
        "heads count alike (no gradients in this run)"
        in run(["budget", str(frontier_run(tmp_path / "old").path)], capsys)[1]
    )
    assert "gradient of log p" in " ".join(run(["budget", "--help"], capsys)[1].split())


def test_weights_of_a_run_without_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(frontier_run(tmp_path / "probe").path)
    code, _, err = run(["budget", path, "--rule", "heavy", "--weights", path], capsys)
    assert code == 2
    assert "has no table sensitivity; run esscher downstream with --sensitivity" in err
