"""esscher compress and budget --weights as users call them, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from esscher.compress.spec import CompressSpec
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
    "--sinks",
    "2",
    "--recent",
    "4",
]


def test_a_run_its_tables_and_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, text, out = str(folder() / "llama"), str(folder() / "text.txt"), str(tmp_path / "run")
    more = ["--rules", "fisher", "--rules", "snapkv", "--keep", "0.3,0.5,0.7", "--check"]
    code, said, _ = run(["compress", model, "--text", text, *ASKED, *more, "--out", out], capsys)
    assert code == 0
    assert "Keeping 30.0% of the cache costs" in said
    assert len(said.splitlines()) <= 28
    for words in ("rule", "share of the cache", "kl predicted", "loss added"):
        assert words in said
    for words in ("measured / predicted", "measured over predicted", "rank correlation"):
        assert words in said
    figure = (tmp_path / "run" / "check.svg").read_text("utf-8")
    assert "predicted = measured" in figure
    checked = load_run(tmp_path / "run").table("check")
    assert len(checked) == 2 * 3
    assert checked["ratio"].tolist() == pytest.approx(checked["kl"] / checked["kl_predicted"])
    titles = [chart["title"] for chart in content_of(load_run(tmp_path / "run"))["charts"]]
    assert {"kl", "Predicted against measured loss", "loss added"} <= set(titles)
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    code, said, _ = run(["resume", out, "--json"], capsys)
    assert code == 0
    rows = [row for row in json.loads(said)["rows"] if row["rule"] == "fisher"]
    wanted = "rule split keep kl kl_low kl_high kl_predicted loss_added agreement keys bytes"
    assert {*wanted.split(), "bytes_full"} <= set(rows[0])
    assert [row["keep"] for row in rows] == [0.3, 0.5, 0.7]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--keep", "0"], "keep: expected shares of the cache above 0 and up to 1"),
        (["--keep", "1.2"], "keep: expected shares of the cache above 0 and up to 1"),
        (["--keep", "x"], "keep: expected numbers such as 0.05,0.1"),
        (["--kl", "-1"], "kl: "),
        (["--kl", "0.1", "--keep", "0.1"], "--keep, --kl: give a size or a loss, not both"),
        (["--rules", "nothing"], "no rule 'nothing'"),
        (["--text", "-"], "--text -: standard input can be read once"),
        (["--layers", "a"], "--layers: expected numbers such as 0,2-4"),
    ],
)
def test_bad_flags_end_in_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(["compress", str(folder() / "llama"), *flags], capsys)
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
        {"layer": layer, "head": head, "plain": 1.0, "nats": felt[layer, head] ** 2 / 2}
        for layer, head in CONSTANTS
    ]
    elsewhere = str(store_run(tmp_path / "elsewhere", CompressSpec(), {"sensitivity": rows}).path)
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


def test_weights_of_a_run_without_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(frontier_run(tmp_path / "probe").path)
    code, _, err = run(["budget", path, "--rule", "heavy", "--weights", path], capsys)
    assert code == 2
    assert "has no table sensitivity; run esscher compress with --sensitivity" in err
