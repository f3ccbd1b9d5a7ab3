"""Damaged stores, file by file and damage by damage: each is refused with one line or repaired to
the same tables.

Nothing outside the run changes, nothing waits for ever, and no text of a damaged file reaches a
terminal raw.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from esscher.cli import main
from esscher.runs import Run, RunError, execute, load_run, tables
from esscher.runs.tables import decode_shard, decode_table, encode_shard, encode_table
from tests.runs.job import WalkSpec
from tests.surroundings import ended_after, surroundings, tree_hash

SPEC = WalkSpec(walks=3)
SHARD = "shards/000001.parquet"
JSON_FILES = ("manifest.json", "lock")
FILES = (*JSON_FILES, SHARD, "ends.parquet")
DEEP = 10_000
ESCAPES = "\x1b[31mred\x1b[0m \x9b2J \u202eback\x07\r\n\tx"
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return execute(SPEC, tmp_path_factory.mktemp("sound") / "run").path


# ---- damages
# ------------------------------------------------------------------------------------------

CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "space": b" \n",
    "zeros": bytes(4096),
    "no-utf-8": b'{"job": "\xff\xfe"}',
    "brace": b"{",
    "list": b"[]",
    "list-of-lists": b"[[1], [2]]",
    "number": b"17",
    "null": b"null",
    "text": b'"walk"',
    "true": b"true",
    "nan": b"NaN",
    "huge-number": b"1" * 5000,
    "empty-object": b"{}",
    "other-object": b'{"a": 1}',
    "deep-list": b"[" * DEEP + b"]" * DEEP,
    "deep-object": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep-inside": b'{"spec":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep-open": b"[" * 100_000,
    "escapes": ESCAPES.encode(),
    "yaml": b"job: walk\n",
}


def written(file: str, content: bytes) -> Damage:
    return lambda run: write(run / file, content)


def write(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def truncated(file: str, share: float) -> Damage:
    def damage(run: Path) -> None:
        data = (run / file).read_bytes() if (run / file).exists() else b'{"pid": 1, "host": "h"}'
        write(run / file, data[: int(len(data) * share)])

    return damage


def replaced(file: str, make: Callable[[Path], None]) -> Damage:
    def damage(run: Path) -> None:
        (run / file).unlink(missing_ok=True)
        make(run / file)

    return damage


def beside(path: Path) -> Path:
    return next(parent for parent in path.parents if (parent / "precious.txt").exists())


def bind(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's whole name may have 108 letters
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(path.name)
    finally:
        os.chdir(here)


KINDS: dict[str, Callable[[Path], None]] = {
    "missing": lambda path: None,
    "pipe": os.mkfifo,
    "folder": lambda path: path.mkdir(),
    "full-folder": lambda path: (path.mkdir(), (path / "x").write_bytes(b"x"))[0],
    "socket": bind,
    "link": lambda path: path.symlink_to(beside(path) / "precious.txt"),
    "link-to-nothing": lambda path: path.symlink_to(beside(path) / "nothing"),
    "link-to-itself": lambda path: path.symlink_to(path.name),
    "link-to-device": lambda path: path.symlink_to("/dev/zero"),
    "link-to-full": lambda path: path.symlink_to("/dev/full"),
    "link-to-memory": lambda path: path.symlink_to("/proc/self/mem"),
    "link-to-folder": lambda path: path.symlink_to(beside(path) / "elsewhere"),
    "second-name": lambda path: path.hardlink_to(beside(path) / "precious.txt"),
}

VALUES: dict[str, Any] = {
    "none": None,
    "list": [],
    "number": -1,
    "large": 10**40,
    "text": ESCAPES,
    "object": {"a": [None]},
    "gone": ...,
}
FIELDS = (
    "schema_version",
    "job",
    "spec",
    "spec_hash",
    "hashes",
    "units",
    "units_hash",
    "status",
    "starts",
    "failures",
)
FIELDS += ("notes", "tables", "checksums", "started", "threads")


def field(name: str, value: Any) -> Damage:
    def damage(run: Path) -> None:
        content = json.loads((run / "manifest.json").read_bytes())
        content = {key: item for key, item in {**content, name: value}.items() if item is not ...}
        write(run / "manifest.json", json.dumps(content).encode())

    return damage


def forged(file: str, text: str | None = None, columns: Any = None, **changes: Any) -> Damage:
    """A file with a right checksum and another header or other columns than the run wrote."""

    def damage(run: Path) -> None:
        data = (run / file).read_bytes()
        shard = file.startswith("shards")
        header, content = (decode_shard if shard else decode_table)(data, file)
        header = {key: item for key, item in {**header, **changes}.items() if item is not ...}
        if columns is not None:
            content = {"points": columns, "ends": columns} if shard else columns
        with pytest.MonkeyPatch.context() as patch:
            if text is not None:
                patch.setattr(tables, "canonical_json", lambda value: text)
            write(
                run / file,
                encode_shard(content, header) if shard else encode_table(content, header),
            )

    return damage


def foreign_parquet(file: str) -> Damage:
    def damage(run: Path) -> None:
        sink = io.BytesIO()
        pq.write_table(pa.table({"walk": ["x"], "end": [1.0]}), sink)
        write(run / file, sink.getvalue())

    return damage


def stray(name: str, of: str = SHARD) -> Damage:
    return lambda run: (shutil.copy(run / of, run / "shards" / name), None)[1]


def swapped(run: Path) -> None:
    (run / "ends.parquet").rename(run / "x")
    (run / "points.parquet").rename(run / "ends.parquet")
    (run / "x").rename(run / "points.parquet")


def linked_shards(run: Path) -> None:
    shutil.rmtree(run / "shards")
    (run / "shards").symlink_to(run.parent / "elsewhere")


def linked_sound_shards(run: Path) -> None:
    (run / "shards").rename(run.parent / "elsewhere" / "shards")
    (run / "shards").symlink_to(run.parent / "elsewhere" / "shards")


def shards_a_file(run: Path) -> None:
    shutil.rmtree(run / "shards")
    (run / "shards").write_bytes(b"")


def everything(file: str, content: bytes) -> Damage:
    def damage(run: Path) -> None:
        for path in [run / "manifest.json", *(run / "shards").glob("*.parquet")]:
            if file == "all" or (file == "shards" and path.parent != run):
                write(path, content)

    return damage


TEXTS = pa.table({"walk": pa.array(["x"]), "step": pa.array([[1]]), "place": pa.array(["y"])})
OTHERS = pa.table({ESCAPES: pa.array([None])})

DAMAGES: dict[str, Damage] = {
    **{
        f"{file}: {name}": written(file, content)
        for file in JSON_FILES
        for name, content in CONTENTS.items()
    },
    **{
        f"{file}: {name}": written(file, CONTENTS[name])
        for file in (SHARD, "ends.parquet")
        for name in ("empty", "zeros", "null")
    },
    **{
        f"{file}: cut to {share}": truncated(file, share)
        for file in FILES
        for share in (0.1, 0.5, 0.99)
    },
    **{f"{file}: {name}": replaced(file, make) for file in FILES for name, make in KINDS.items()},
    **{f"{file}: foreign Parquet": foreign_parquet(file) for file in FILES},
    **{
        f"manifest.json: {name} {kind}": field(name, value)
        for name in FIELDS
        for kind, value in VALUES.items()
    },
    "manifest.json: no start": field("starts", []),
    **{
        f"{file}: header {name}": forged(file, text=content.decode("utf-8", "ignore"))
        for file in (SHARD, "ends.parquet")
        for name, content in CONTENTS.items()
    },
    **{
        f"{SHARD}: header's {name} {kind}": forged(SHARD, **{name: value})
        for name in ("job", "spec", "spec_hash", "hashes", "index", "unit")
        for kind, value in VALUES.items()
    },
    **{
        f"ends.parquet: header's {name} gone": forged("ends.parquet", **{name: ...})
        for name in ("table", "spec_hash")
    },
    "ends.parquet: says it is another table": forged("ends.parquet", table="points"),
    **{f"{file}: columns of text": forged(file, columns=TEXTS) for file in (SHARD, "ends.parquet")},
    **{
        f"{file}: columns of other names": forged(file, columns=OTHERS)
        for file in (SHARD, "ends.parquet")
    },
    "tables: swapped": swapped,
    **{
        f"stray {name}": stray(name)
        for name in (
            "000099.parquet",
            "1.parquet",
            "0000001.parquet",
            "\u0661.parquet",
            "copy of 000001.parquet",
            "x.tmp",
        )
    },
    "stray with escapes": stray(f"{ESCAPES.replace('/', '')}.parquet"),
    "stray table": stray("ends.parquet", "ends.parquet"),
    "shard of another unit": stray("000001.parquet", "shards/000002.parquet"),
    "shards: a link to others": linked_shards,
    "shards: a link to its own": linked_sound_shards,
    "shards: a file": shards_a_file,
    "all: empty": everything("all", b""),
    "all: deep": everything("all", CONTENTS["deep-list"]),
    "shards: null": everything("shards", b"null"),
}


# ---- the table
# ------------------------------------------------------------------------------------------


@pytest.fixture
def place(folder: Path, sound: Path) -> Path:
    """A folder with a copy of a sound run and other things."""
    surroundings(folder)
    shutil.copytree(sound, folder / "run")
    return folder


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Exit code and lines on stderr of a command, which are printable and short, and one that
    refuses at most.
    """
    with ended_after(60), pytest.raises(SystemExit) as stop:
        main(arguments)
    lines = capsys.readouterr().err.splitlines()
    for line in lines:
        assert line.isprintable(), line
        assert len(line) <= 500
    code = int(stop.value.code or 0)
    assert sum(line.startswith("esscher: ") for line in lines) == (code == 2)
    return code, lines


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_store_is_refused_or_repaired(
    name: str,
    place: Path,
    sound: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = place / "run"
    DAMAGES[name](run)
    around = tree_hash(place, but="run")
    assert said(["ls", str(place)], capsys)[0] == 0
    assert all(record.getMessage().isprintable() for record in caplog.records)
    assert said(["export", str(run), "--out", str(run / "exported")], capsys)[0] in (0, 2)
    code, _ = said(["resume", str(run)], capsys)
    assert code in (0, 2)
    assert tree_hash(place, but="run") == around
    if code == 0:
        for table in ("ends.parquet", "points.parquet"):
            assert (run / table).read_bytes() == (sound / table).read_bytes()


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json: deep-list",
        "shards/000001.parquet: pipe",
        "tables: swapped",
        "ends.parquet: link",
    ],
)
def test_what_can_be_repaired_is(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGES[name](place / "run")
    assert said(["resume", str(place / "run")], capsys)[0] == 0
    assert load_run(place / "run").status == "complete"


@pytest.mark.parametrize("name", [name for name in DAMAGES if name.startswith("stray")])
def test_a_stray_is_left_alone_and_named(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in a run that is not finished, whose tables are made after the stray came."""
    run = place / "run"
    before = {path.name for path in (run / "shards").iterdir()}
    DAMAGES[name](run)
    (left,) = {path.name for path in (run / "shards").iterdir()} - before
    (run / "shards" / "000002.parquet").unlink()
    assert len(load_run(run).partial("ends")) == 2
    code, lines = said(["resume", str(run)], capsys)
    assert code == 0
    assert sum("not a shard of this run; left alone" in line for line in lines) == 1
    assert (run / "shards" / left).exists()
    assert load_run(run).table("ends")["walk"].tolist() == [0, 1, 2]


def test_a_report_of_a_damaged_run_is_refused_with_one_line(
    place: Path, sound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (
        "manifest.json: deep-inside",
        "ends.parquet: pipe",
        "ends.parquet: columns of text",
        "tables: swapped",
    ):
        shutil.rmtree(place / "run")
        shutil.copytree(sound, place / "run")
        DAMAGES[name](place / "run")
        assert said(["report", str(place / "run")], capsys)[0] == 2


def test_a_table_of_the_wrong_name_or_content_is_not_read(place: Path) -> None:
    swapped(place / "run")
    with pytest.raises(
        RunError, match=r"ends\.parquet: holds the table 'points'; esscher resume .* makes it anew"
    ):
        load_run(place / "run").table("ends")


def test_runs_without_checksums_in_their_manifest_still_open(place: Path, sound: Path) -> None:
    """As those begun before the manifest had them."""
    field("checksums", ...)(place / "run")
    run: Run = load_run(place / "run")
    assert run.table("ends").equals(load_run(sound).table("ends"))
