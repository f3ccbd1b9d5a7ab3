"""Examples that start a command: flags given to them reach it, as the pages that print them say."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# as `python examples/large_corpus.py FOLDER TOKENS --layers 0,1`
PRINTED = re.compile(r"^python (examples/\w+\.py) (.*--.*)$", re.MULTILINE)


def printed() -> list[tuple[str, str]]:
    """Examples with flags in the pages, and one more."""
    found = [("examples/large_corpus.py", "runs/kjv 2048 --layers 0,1 --moments 5")]
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        found += PRINTED.findall(page.read_text("utf-8"))
    return found


@pytest.mark.parametrize(("script", "arguments"), printed())
def test_flags_reach_the_command(
    script: str, arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []

    def call(command: list[str]) -> int:
        called.append(command)
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "call", call)
    text = iter(["In the beginning"])
    monkeypatch.setattr("esscher.corpus.documents.packaged_documents", lambda domain: text)
    given = shlex.split(arguments)
    monkeypatch.setattr(sys, "argv", [script, *given])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert stop.value.code == 0
    (command,) = called
    flags = given[next(i for i, word in enumerate(given) if word.startswith("--")) :]
    assert command[-len(flags) :] == flags  # last, so that they win over the example's own
