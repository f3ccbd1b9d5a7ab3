"""Documents out of files, folders, datasets by name, and text that is on every machine. What cannot
be read is a ValueError of one line.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import functools
import hashlib
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
from esscher.runs.errors import printable
from esscher.runs.store import open_regular

Piece = tuple[bool, str]  # a stretch of text, and whether a new document starts with it
BLOCK = 1 << 20  # characters
ROWS = 512
# Files read out of a folder without a field; any other file is read when it is named itself.
TEXTS = (
    ".txt .text .md .markdown .rst .tex .org .adoc .html .htm .xml .log .py .pyi .c .h .cc .cpp"
    " .hpp .cs .java .kt .scala .js .ts .go .rs .rb .php .pl .lua .r .jl .m .f90 .sh .sql .hs .ml"
    " .el"
)
MARKS = {  # UTF-32's begins with UTF-16's
    "utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
BINARY = "it looks binary; unpack or convert it to text first"
LICENCE = re.compile(r"licen[cs]e|copying|copyright|notice", re.IGNORECASE)
SURROGATES = re.compile("[\ud800-\udfff]")


def _bad(place: str, expected: str, got: str, advice: str) -> ValueError:
    """The error for what cannot be read as text."""
    return ValueError(f"{place}: expected {expected}, got {got}; {advice}")


def read_documents(spec: CorpusSpec) -> Iterator[str]:
    """Documents one by one; a file is read when its turn comes."""
    held: list[str] = []
    for starts, text in read_pieces(spec):
        if starts and held:
            yield "".join(held)
            held = []
        held.append(text)
    yield "".join(held)


def read_pieces(spec: CorpusSpec) -> Iterator[Piece]:
    """The same in stretches, so that a document need not be in memory whole; documents without text
    are left out.
    """
    count = 0
    for starts, text in _source(spec):
        if starts and (not text or text.isspace()):
            continue
        count += starts
        if spec.limit is not None and count > spec.limit:
            return
        # half a surrogate pair, which JSON can hold and UTF-8 cannot
        yield starts, SURROGATES.sub("\ufffd", text)
    if count == 0:
        raise _bad("corpus", "text", "documents without any", "give a source with text")


def check_text(spec: CorpusSpec) -> None:
    """Refuse files and folders that are missing, empty or no text, by the first block of each."""
    for name in spec.text:
        next(_source(spec.model_copy(update={"text": (name,)})), None)


def _source(spec: CorpusSpec) -> Iterator[Piece]:
    if spec.dataset is not None:
        yield from _texts(_dataset(spec.dataset, spec.split), spec.field)
    elif spec.packaged is not None:
        yield from ((True, text) for text in packaged_documents(spec.packaged))
    for name in spec.text:
        if not name or "\0" in name:
            raise _bad("text", "the name of a file", repr(name), "give a file or a directory")
        elif os.path.isdir(name):
            for path in _folder_files(Path(name), tables=spec.field is not None):
                yield from _file(path, spec.encoding, spec.field, listed=True)
        else:
            yield from _file(Path(name), spec.encoding, spec.field)


# ---- Files and streams


def _folder_files(folder: Path, tables: bool) -> list[Path]:
    """Files of a folder and below it in the order of their names: tables when a field is asked for,
    else texts. Hidden names and folders behind symbolic links are left out.
    """
    wanted = set(TABLES) if tables else set(TEXTS.split())
    found, seen = [], 0
    for parent, folders, files in os.walk(folder, onerror=_not_listed):
        folders[:] = [name for name in folders if not name.startswith(".")]
        visible = [name for name in files if not name.startswith(".")]
        seen += len(visible)
        found += [Path(parent, name) for name in visible if Path(name).suffix.lower() in wanted]
    if not found:
        kinds = f"tables ({NAMES})" if tables else "text files (.txt, .md, .py, ...)"
        got = f"{seen} other files"
        raise _bad(_show(folder), f"a directory with {kinds}", got, "name the files themselves")
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def _not_listed(cause: OSError) -> None:
    raise ValueError(
        f"{_show(cause.filename)}: cannot be read: {cause.strerror}; give a directory that can be"
        " listed"
    ) from cause


def _file(path: Path, encoding: str, field: str | None, *, listed: bool = False) -> Iterator[Piece]:
    """The documents of one file: the whole text, or one per row of a table. ``listed``: found in a
    folder.
    """
    name, kind = _show(path), path.suffix.lower()
    try:
        with open_regular(path) as stream:
            if kind == ".parquet":
                yield from _texts(_parquet(path, field), field)
                return
            with _decoded(stream, name, encoding) as text:
                if kind in TABLES:
                    yield from _texts(TABLES[kind](text, name), field)
                    return
                if field is not None and not listed:
                    raise ValueError(
                        f"{name}: field '{field}' was asked for, but a field needs a table"
                        f" ({NAMES}); leave the field out"
                    )
                yield from _plain(text, name, must=not listed)
    except OSError as cause:
        raise ValueError(
            f"{name}: cannot be read: {cause.strerror or cause}; give a readable text file"
        ) from cause


@contextlib.contextmanager
def _decoded(stream: Any, name: str, encoding: str) -> Iterator[io.TextIOWrapper]:
    """The text of a byte stream without its byte order mark; ValueError where it is none."""
    data = io.BufferedReader(stream)
    head = data.peek(4096)[:4096]
    if not codecs.lookup(encoding).name.startswith(("utf-16", "utf-32")):
        _refuse_binary(head, name, encoding)
    text = io.TextIOWrapper(data, encoding, newline="\n")
    try:
        if head.startswith(codecs.BOM_UTF8):
            text.read(1)
        yield text
    except UnicodeDecodeError as cause:
        sample = cause.object[max(0, cause.start - 200) : cause.start + 200]
        binary = any(byte < 9 or 13 < byte < 32 for byte in sample)
        advice = "set encoding to what it was written in (cp1252, latin-1, ...)"
        place = f" at {data.tell() - len(cause.object) + cause.start}" if data.seekable() else ""
        got = f"byte 0x{cause.object[cause.start]:02x}{place}"
        raise _bad(name, f"{encoding} text", got, BINARY if binary else advice) from cause
    finally:
        text.detach()
        data.detach()


def _refuse_binary(head: bytes, name: str, encoding: str) -> None:
    """Refuse what its first bytes show to be something else."""
    expected = f"{encoding} text"
    for likely, marks in MARKS.items():
        if head.startswith(marks):
            got = f"the byte order mark of {likely}"
            raise _bad(name, expected, got, f"set encoding to {likely}")
    if b"\0" in head:
        # UTF-16 without a mark: text of mostly one script has its zeros on one side of the pairs
        even, odd = head[::2].count(0), head[1::2].count(0)
        advice = BINARY
        if max(even, odd) >= max(4, len(head) // 16) and min(even, odd) <= max(even, odd) // 8:
            advice = f"set encoding to utf-16-{'le' if odd > even else 'be'}, which it looks like"
        raise _bad(name, expected, f"a zero character near byte {head.find(0)}", advice)


def _plain(text: io.TextIOWrapper, name: str, *, must: bool) -> Iterator[Piece]:
    """All of a file as one document; white space alone is no document."""
    held, started = "", False
    for block in iter(lambda: text.read(BLOCK), ""):
        if started:
            yield False, block
        elif block.isspace():
            held += block
        else:
            yield True, held + block
            started = True
    if must and not started:
        got = "white space alone" if held else "an empty file"
        raise _bad(name, "text", got, "give a file with text")


# ---- Tables: one document per row, the text in one field. A reader yields rows with their places.

Row = tuple[str, Any]


def _texts(rows: Iterable[Row], field: str | None) -> Iterator[Piece]:
    """The field of each row, ``text`` unless told; a row may be a string; null is an empty text."""
    wanted = "text" if field is None else field
    for place, row in rows:
        value = row
        if not isinstance(row, str) or field is not None:
            if not isinstance(row, dict):
                got = type(row).__name__
                raise _bad(place, "an object with a field of text", got, "mend the file")
            if wanted not in row:
                names = ", ".join(_show(str(name))[:40] for name in list(row)[:12]) or "none"
                got = f"the fields {names}"
                raise _bad(place, f"a field '{wanted}'", got, "set field to one of them")
            value = row[wanted]
        if value is not None and not isinstance(value, str):
            where, got = f"{place}, field '{wanted}'", type(value).__name__
            raise _bad(where, "a string", got, "name a field that holds text")
        yield True, value or ""


def _json(text: io.TextIOWrapper, name: str) -> Iterator[Row]:
    """One value a line, or one array over all lines."""
    number = 0
    for number, line in enumerate(text, 1):
        is_array = re.match(r"\s*\[\s*($|[{\"])", line)
        whole = line + text.read() if is_array else line
        if not whole.strip():
            continue
        try:
            value = json.loads(whole)
        except (ValueError, RecursionError) as cause:
            wanted = "JSON, one object a line or one array"
            got = f"{whole.strip()[:40]!r} ({str(cause)[:80]})"
            raise _bad(f"{name}, line {number}", wanted, got, "mend the line") from cause
        if not is_array:
            yield f"{name}, line {number}", value
        else:
            yield from ((f"{name}, item {i}", item) for i, item in enumerate(value, 1))
    if number == 0:
        raise _bad(name, "JSON Lines", "an empty file", "give a file with one object a line")


def _csv(text: io.TextIOWrapper, name: str, delimiter: str = ",") -> Iterator[Row]:
    """The first row names the fields; quoted fields may hold line ends."""
    csv.field_size_limit(2**31 - 1)
    reader = csv.DictReader(text, delimiter=delimiter, strict=True)
    try:
        if not reader.fieldnames:
            raise _bad(name, "names of fields", "an empty file", "give rows")
        for row in reader:
            place, fields = f"{name}, line {reader.line_num}", len(reader.fieldnames)
            if None in row or None in row.values():
                found = sum(value is not None for value in row.values())
                raise _bad(place, f"{fields} fields", f"{found}", "mend the row")
            yield place, row
    except csv.Error as cause:
        place = f"{name}, line {reader.reader.line_num}"
        raise _bad(place, "rows of fields", f"bad quoting ({cause})", "mend it") from cause


def _parquet(path: Path, field: str | None) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    name, numbers = _show(path), itertools.count(1)
    try:
        with pq.ParquetFile(path) as table:
            wanted = field or "text"
            columns = [wanted] if wanted in table.schema_arrow.names else None
            for batch in table.iter_batches(ROWS, columns=columns):
                yield from ((f"{name}, row {next(numbers)}", row) for row in batch.to_pylist())
    except (pa.ArrowException, UnicodeDecodeError) as cause:
        got = f"what cannot be read ({' '.join(str(cause).split())[:120]})"
        raise _bad(name, "a Parquet table of text", got, "mend it") from cause


TABLES: dict[str, Callable[..., Iterator[Row]]] = {
    ".jsonl": _json,
    ".ndjson": _json,
    ".json": _json,
    ".csv": _csv,
    ".tsv": functools.partial(_csv, delimiter="\t"),
    ".parquet": _parquet,
}


NAMES = ", ".join(sorted(TABLES))


def _show(name: str | Path) -> str:
    """A name on one line, whatever characters it holds."""
    return printable(str(name))


def _dataset(dataset: str, split: str) -> Iterator[Row]:
    """Rows of a dataset as they arrive; only data files are read, never code of the dataset."""
    try:
        import datasets
    except ImportError as cause:
        raise ValueError(
            "dataset: the package datasets is not installed; pip install 'esscher[hf]'"
        ) from cause
    name, _, config = (dataset, "", "") if os.path.exists(dataset) else dataset.partition(":")
    options = {"split": split, "streaming": True}
    try:
        with quiet():
            rows = iter(datasets.load_dataset(name, config or None, **options))
            first = [row for row in (next(rows, None),) if row is not None]
        for number, row in enumerate(itertools.chain(first, rows), 1):
            yield f"dataset {_show(dataset)}, row {number}", row
    except Exception as cause:  # whatever the hub, the files or their readers raise
        raise ValueError(
            f"dataset {_show(dataset)}: split '{split}' cannot be read ({type(cause).__name__}:"
            f" {' '.join(str(cause).split())[:160]}); check its name ('name' or 'name:config'), the"
            " split and the network, or give files with text"
        ) from cause


# ---- Text that is on every machine


def packaged_documents(domain: str) -> Iterator[str]:
    """``prose``: Python's manual by topic; ``code``: its standard library by file; ``legal``:
    licences by distribution.

    In the order of their names. Prose and code are fixed by the version of Python, licences by what
    is installed.
    """
    if domain == "prose":
        topics = pydoc_data.topics.topics
        return (topics[name] for name in sorted(topics))
    return _code() if domain == "code" else _legal()


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
    if not chosen:
        raise ValueError(
            "packaged code: this Python has no source of its standard library; give files with"
            " --text"
        )


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
    if not seen:
        raise ValueError(
            "packaged legal: no installed distribution has a licence file; give files with --text"
        )
