"""``esscher report`` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import run
from tests.report.atlas import sparse_run


def test_page_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (str(sparse_run(tmp_path / name).path) for name in ("a", "b"))
    code, out, err = run(["report", first], capsys)
    assert (code, out) == (0, "")
    assert err == f"page: {first}/report.html\n"
    page = tmp_path / "pages" / "both.html"
    arguments = ["report", first, second, "--out", str(page), "--figures", "svg,png"]
    code, out, _ = run([*arguments, "--json"], capsys)
    assert code == 0
    told = json.loads(out)
    assert told["page"] == str(page)
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert {Path(file).suffix for file in told["figures"]} == {".svg", ".png"}
    assert {Path(file).parent for file in told["figures"]} == {
        tmp_path / "a" / "figures",
        tmp_path / "b" / "figures",
    }
    assert all(Path(file).exists() for file in told["figures"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such run directory"),
        (["RUN", "--figures", "gif"], "--figures: expected some of svg, pdf, png, got gif"),
        (["RUN", "--out", "."], "out: expected a file name such as report.html, got the folder ."),
        ([], "Missing argument 'RUN'. (see esscher report --help)"),
    ],
)
def test_bad_input(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = str(sparse_run(tmp_path / "run").path)
    code, out, err = run(
        ["report", *(made if part == "RUN" else part for part in arguments)], capsys
    )
    assert (code, out) == (2, "")
    assert err == f"esscher: {message}\n"
