"""Tutorials as tests: the commands of a page run in order, and print what it shows."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.cli.commands import run
from tests.pages import blocks

TUTORIALS = sorted((Path(__file__).parents[1] / "docs" / "tutorials").glob("*.md"))


def commands(body: str) -> list[list[str]]:
    """Lines, those that end with a backslash joined to the next."""
    return [shlex.split(line)[1:] for line in body.replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize("page", TUTORIALS, ids=[page.stem for page in TUTORIALS])
def test_tutorial_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands on MODEL, which stands for the reader's, are not run; outputs are those of a terminal of 100 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    text = page.read_text("utf-8")
    ran = [block for block in blocks(text, "sh") if "MODEL" not in block.body]
    assert ran
    for block in ran:
        outputs = []
        for command in commands(block.body):
            code, out, err = run(command, capsys)
            assert code == 0, err
            outputs += [line.rstrip() for line in out.splitlines()]
        if block.shown is not None:
            assert outputs == block.shown.splitlines(), f"{page.name}:{block.line}"
    written = "".join(path.read_text("utf-8") for path in tmp_path.glob("*.json"))
    for excerpt in blocks(text, "json"):
        assert excerpt.body in written
