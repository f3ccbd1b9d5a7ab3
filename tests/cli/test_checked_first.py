"""Mistakes that need no weights to be seen are told before weights are read, which may take
minutes.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from esscher.hf import loading
from tests.cli.commands import run
from tests.models.probe_runs import save_tiny

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model, an encoder, and files to give them."""
    path = tmp_path_factory.mktemp("first")
    save_tiny(path / "llama", "llama", **SIZES)
    save_tiny(path / "bert", "bert", max_position_embeddings=128)
    (path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200, "utf-8")
    (path / "short.txt").write_text("hi", "utf-8")
    (path / "binary.txt").write_bytes(b"\x7fELF\x00\x01")
    (path / "empty").mkdir()
    (path / "full").mkdir()
    (path / "full" / "other.txt").touch()
    return path


@pytest.fixture
def no_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that fails the test if it is called."""

    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(loading, "_weights", read)
    monkeypatch.chdir(folder)


PROBE = {
    "probe llama --text none.txt": "none.txt: cannot be read: No such file",
    "probe llama --text binary.txt": "binary.txt: expected UTF-8 text, got a",
    "probe llama --text empty": "expected a directory with text files",
    "probe llama --text text.txt --text none.txt": "none.txt: cannot be read",
    "probe llama --text short.txt": "nothing can be measured; give a longer text",
    "probe llama --text text.txt --layers 7": "layers: llama has layers 0 to 1, got 7",
    "probe llama --text text.txt --heads 4": "heads: llama has heads 0 to 3, got 4",
    "probe llama --text text.txt --window 999": "window: llama takes at most 128 positions",
    "probe llama --text text.txt --positions 500": "expected places from 0 to 127, got 500",
    "probe llama --text text.txt --n 16,500": "the pool has 128 keys, got n = 500",
    "probe llama --text text.txt --rules sinks:999+recent": "sinks: expected at most 9",
    "probe llama --text text.txt --rules best": "no rule 'best'",
    "probe llama --text text.txt --moments 5": "moments: they are of tokens of the whole corpus",
    "probe llama --text text.txt --device warp": "device: 'warp' cannot be used here",
    "probe llama --text text.txt --revision main": "has no revisions, got 'main'",
    "probe llama --text text.txt --out text.txt": "text.txt is a file; choose another folder",
    "probe llama --text text.txt --out text.txt/run": "text.txt is a file; choose another folder",
    "probe llama --text text.txt --out full": "holds 'other.txt' and no run",
    "probe bert --text text.txt --positions 5": "positions: they are of queries in their own",
    "probe bert --text text.txt --rules random": "rules: they are of a query's own context",
    "probe llama --dataset no/such/name --text text.txt": "expected one source of text",
    "probe nowhere/near/here": "no such model folder",
    "probe llama --dry-run --layers 7": "layers: llama has layers 0 to 1, got 7",
    "probe llama --dry-run --heads 4": "heads: llama has heads 0 to 3, got 4",
    "probe llama --dry-run --window 999": "window: llama takes at most 128 positions",
    "probe llama --dry-run --rules sinks:999+recent": "sinks: expected at most 9",
    "probe llama --dry-run --text none.txt": "none.txt: cannot be read",
}
DOWN = "compress llama --window 64 --decode 16 --keep 0.5 --text"
COMPRESS = {
    f"{DOWN} none.txt": "none.txt: cannot be read",
    f"{DOWN} short.txt": "texts: the text fills 0 windows of 80 tokens",
    f"{DOWN} text.txt --layers 7": "layers: llama has layers 0 to 1, got 7",
    f"{DOWN} text.txt --window 999": "window: llama takes at most 128 positions",
    f"{DOWN} text.txt --texts 500": "texts: the text fills",
    f"{DOWN} text.txt --rules heavy:999+random": "expected at most 64, the number of keys",
    f"{DOWN} text.txt --rules sinks:4+recent:32+heavy": "always keeps 36 of 64 keys",
    f"{DOWN} text.txt --out full": "holds 'other.txt' and no run",
    "compress bert --text text.txt --window 64 --when cache": "when: bert is no language model",
    "compress bert --text text.txt --window 64 --needles 2": "needles: it is of a KV cache",
}


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", [*PROBE, *COMPRESS])
def test_a_mistake_is_told_before_weights_are_read(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))
    code, out, err = run(command.split(), capsys)
    assert (code, out) == (2, "")
    assert (PROBE | COMPRESS)[command] in err
    assert len(err.splitlines()) == 1
    assert sorted(folder.rglob("*")) == before


def test_a_run_whose_text_is_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    shutil.copy("text.txt", "gone.txt")
    asked = "probe llama --text gone.txt --max-tokens 256 --queries 8 --rules none --out done"
    assert run(f"{asked} --layers 0 --no-report".split(), capsys)[0] == 0
    (folder / "done" / "heads.parquet").unlink()
    (folder / "gone.txt").unlink()
    monkeypatch.setattr(loading, "_weights", None)  # calling it would be a TypeError
    code, _, err = run(["resume", "done"], capsys)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "gone.txt: cannot be read" in err
