"""esscher compress as users call it, on a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from esscher.report.page import content_of
from esscher.runs import load_run
from tests.cli.commands import run
from tests.compress.runs import folder

ASKED = [
    "--texts",
    "3",
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
    assert re.search(
        r": \w+ keeps \d+\.\d% of the cache and loses \S+ \[\S+ \S+ nats per token", said
    )
    assert re.search(r"^Keeping 30% loses ", said, re.M)
    assert len(said.splitlines()) <= 12
    for words in (
        "rule",
        "of the cache",
        "KL predicted",
        "loss added",
        "Next: cache = es.compress(",
    ):
        assert words in said
    for words in ("Measured over predicted", "rank correlation"):
        assert words in said
    asked = ["compress", model, "--text", text, *ASKED, *more, "--out", out, "--all"]
    assert "measured / predicted" in run(asked, capsys)[1]
    assert run(["report", out, "--figures", "svg"], capsys)[0] == 0
    figure = tmp_path / "run" / "figures" / "predicted_against_measured_loss.svg"
    assert "predicted = measured" in figure.read_text("utf-8")
    checked = load_run(tmp_path / "run").table("check")
    assert len(checked) == 2 * 3
    assert checked["ratio"].tolist() == pytest.approx(checked["kl"] / checked["kl_predicted"])
    titles = [chart["title"] for chart in content_of(load_run(tmp_path / "run"))["charts"]]
    of = "against the share of the cache"
    assert {f"KL {of}", "Predicted against measured loss", f"loss added {of}"} <= set(titles)
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
