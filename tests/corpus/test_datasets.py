"""Datasets by name, on local files: rows stream, fields are checked, and no code of a dataset
runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from esscher.corpus import CorpusSpec, make_windows, read_documents
from tests.models.tokenizers_for_tests import plain_ids, prose, tokenizer

datasets = pytest.importorskip("datasets")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    for part in range(3):
        rows = prose()[4 * part : 4 * part + 4]
        pd.DataFrame({"body": rows, "size": [len(row) for row in rows]}).to_parquet(
            tmp_path / f"train-{part:05d}.parquet"
        )
    pd.DataFrame({"body": ["held out"], "size": [8]}).to_parquet(tmp_path / "test-00000.parquet")
    return str(tmp_path)


def refusal(**fields: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        list(read_documents(CorpusSpec(**fields)))
    message = str(caught.value)
    assert message.isprintable()
    assert "; " in message
    return message


def test_rows_are_documents(folder: str) -> None:
    assert tuple(read_documents(CorpusSpec(dataset=folder, field="body"))) == prose()[:12]
    assert tuple(read_documents(CorpusSpec(dataset=folder, field="body", limit=5))) == prose()[:5]
    assert list(read_documents(CorpusSpec(dataset=folder, field="body", split="test"))) == [
        "held out"
    ]


def test_windows_of_a_dataset(folder: str) -> None:
    made = make_windows(CorpusSpec(dataset=folder, field="body"), tokenizer("bert"), 64)
    assert made.documents == 12
    assert made.ids[made.text].tolist() == [
        number for text in prose()[:12] for number in plain_ids("bert", text)
    ]


def test_a_builder_and_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name before the colon is the dataset, the one behind it the configuration."""
    asked: list[Any] = []

    def load(*args: Any, **options: Any) -> list[dict[str, str]]:
        asked.append((args, options))
        return [{"text": "a row"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert list(read_documents(CorpusSpec(dataset="owner/name:small", split="validation"))) == [
        "a row"
    ]
    assert list(read_documents(CorpusSpec(dataset="owner/name"))) == ["a row"]
    assert asked == [
        (("owner/name", "small"), {"split": "validation", "streaming": True}),
        (("owner/name", None), {"split": "train", "streaming": True}),
    ]


def test_what_cannot_be_read_is_refused(folder: str, tmp_path: Path) -> None:
    assert "expected a field 'text', got the fields body, size" in refusal(dataset=folder)
    assert "row 1, field 'size': expected a string, got int" in refusal(
        dataset=folder, field="size"
    )
    assert "split 'dev' cannot be read" in refusal(dataset=folder, split="dev")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "cannot be read" in refusal(dataset=str(empty))


def test_an_unknown_dataset_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nobody/nothing-at-all", "nothing-at-all:config", "a/b/c", ":x", "bad name?"):
        assert "check its name" in refusal(dataset=name)


def test_a_row_that_fails_later(folder: str) -> None:
    (Path(folder) / "train-00001.parquet").write_bytes(b"PAR1 broken PAR1")
    assert "cannot be read" in refusal(dataset=folder, field="body")


def test_a_script_is_not_run(tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    (tmp_path / "trap").mkdir()
    (tmp_path / "trap" / "trap.py").write_text(f"open({str(trap)!r}, 'w')\n")
    assert "cannot be read" in refusal(dataset=str(tmp_path / "trap"))
    assert "cannot be read" in refusal(dataset=str(tmp_path / "trap" / "trap.py"))
    assert not trap.exists()
