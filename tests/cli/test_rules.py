"""``esscher rules``: every rule that can be named, with what it is."""

from __future__ import annotations

import json

import pytest

from esscher import keep
from tests.cli.commands import run


def test_every_rule_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["rules", "--json"], capsys)
    rows = {row["rule"]: row for row in json.loads(out)}
    assert code == 0
    assert set(rows) == set(keep.rules())
    assert rows["snapkv"]["written"] == "snapkv:SIZE:LAST:POOL"
    assert {rows[name]["runs on"] for name in ("snapkv", "streamingllm", "fisher")} == {"any cache"}
    assert {rows[name]["runs on"] for name in ("topk", "neyman")} == {"needs all keys"}
    for row in rows.values():
        assert row["keeps"][:1].isalpha()
        assert row["keeps"].count("(") == row["keeps"].count(")")


def test_the_table_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(["rules"], capsys)
    assert max(map(len, out.splitlines())) <= 80
    assert "snapkv        any cache       Keys of largest weight over the last queries" in out
