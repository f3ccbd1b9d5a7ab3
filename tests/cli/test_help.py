"""Help of every command: it fits a terminal of 80 columns and shows an example; a command may come
from outside.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from esscher.cli.app import COMMANDS
from esscher.cli.icl import icl
from tests.cli.commands import run
from tests.cli.test_start import imported

PARTS = [
    part.name or part.callback.__name__
    for part in icl.registered_commands
    if part.callback is not None
]
LINES: list[list[str]] = [[], *([name] for name in COMMANDS), *(["icl", part] for part in PARTS)]


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(["esscher", *line]))
def test_help_fits_and_shows_an_example(
    line: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run([*line, "--help"], capsys)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert f" Example: {' '.join(['esscher', *line])} " in out


def test_a_mistyped_command_is_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(["prob"], capsys)
    assert code == 2
    assert "Did you mean" in err
    assert "'probe'" in err


OUTSIDE = '''
from esscher.cli.options import Json
from esscher.cli.output import print_json


def greet(name: str, as_json: Json = False) -> None:
    """Greet a head.

    Example: esscher greet 0.1
    """
    if not name[0].isdigit():
        raise ValueError(f"name: expected layer.head, got {name!r}")
    print_json({"head": name}) if as_json else print(f"head {name}")
'''


@pytest.fixture
def other_package(tmp_path: Path) -> dict[str, Any]:
    """An installed package of one module, whose metadata names one command; as environment of a
    process.
    """
    (tmp_path / "greeting.py").write_text(OUTSIDE)
    about = tmp_path / "greeting-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1\n")
    # cite stays ours
    entries = "[esscher.commands]\ngreet = greeting:greet\ncite = greeting:greet\n"
    (about / "entry_points.txt").write_text(entries)
    return {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2] / 'src'}"}


def test_a_command_from_outside(other_package: dict[str, Any], tmp_path: Path) -> None:
    said, _ = imported(["--help"], tmp_path, **other_package)
    assert re.search(r" greet +Greet a head\. ", said)
    assert re.search(r" cite +Print the BibTeX", said)
    assert imported(["greet", "0.1"], tmp_path, **other_package)[0] == "head 0.1\n"
    assert (
        imported(["greet", "0.1", "--json"], tmp_path, **other_package)[0]
        == '{\n  "head": "0.1"\n}\n'
    )


def test_without_the_package_there_is_no_such_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(["greet", "0.1"], capsys)
    assert (code, err) == (2, "esscher: No such command 'greet'. (see esscher --help)\n")
