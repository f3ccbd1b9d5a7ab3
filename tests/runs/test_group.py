"""Several runs in one folder: what is asked for is kept, what else is there is not touched, damage
is named.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from esscher.runs import Damaged, RunError, begin_group, execute, list_runs, load_run, read_group
from tests.runs.job import WalkSpec

SPECS = {"short": WalkSpec(walks=2), "long": WalkSpec(walks=3, steps=7)}


def test_a_group_is_begun_once_and_read_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "group"
    assert read_group(folder) is None
    begin_group(folder, SPECS)
    begin_group(folder, SPECS)
    known = read_group(folder)
    assert known is not None
    assert list(known) == ["short", "long"]
    assert {name: WalkSpec.read(fields) for name, fields in known.items()} == SPECS


def test_other_runs_and_other_things_are_refused(tmp_path: Path) -> None:
    begin_group(tmp_path / "group", SPECS)
    with pytest.raises(RunError, match="holds other runs"):
        begin_group(tmp_path / "group", SPECS | {"long": WalkSpec(walks=4)})
    execute(SPECS["short"], tmp_path / "run")
    with pytest.raises(RunError, match="holds one run"):
        begin_group(tmp_path / "run", SPECS)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    with pytest.raises(RunError, match=r"holds 'letter.txt' and no run"):
        begin_group(tmp_path / "other", SPECS)
    with pytest.raises(Damaged, match="holds several runs"):
        load_run(tmp_path / "group")


def test_runs_of_groups_are_listed(tmp_path: Path) -> None:
    begin_group(tmp_path / "group", SPECS)
    assert list_runs(tmp_path) == []
    execute(SPECS["long"], tmp_path / "group" / "long")
    assert [run.path for run in list_runs(tmp_path)] == [tmp_path / "group" / "long"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"runs": []}',
        '{"runs": {}}',
        '{"runs": {"../x": {}}}',
        '{"runs": {"a": 1}}',
    ],
)
def test_damage_is_one_line(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "group"
    folder.mkdir()
    (folder / "group.json").write_text(content)
    with pytest.raises(Damaged, match=r"group.json: damaged .* each in its own folder") as reason:
        read_group(folder)
    assert "\n" not in str(reason.value)
    assert list_runs(tmp_path) == []
    assert "damaged" in caplog.text


def test_a_name_is_that_of_a_folder(tmp_path: Path) -> None:
    begin_group(tmp_path / "group", SPECS)
    names = json.loads((tmp_path / "group" / "group.json").read_text())["runs"]
    assert list(names) == ["short", "long"]
