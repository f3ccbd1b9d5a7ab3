"""Documents out of files, folders, standard input, datasets by name, and text that is on every
machine. What cannot be read is a ValueError of one line.
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
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from esscher.corpus.spec import CorpusSpec
from esscher.hf.package import quiet
from esscher.runs.errors import printable
from esscher.runs.files import open_regular

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
        raise ValueError(
            "corpus: expected text, got documents without any; give a source with text"
        )


def check_text(spec: CorpusSpec) -> None:
    """Refuse files and folders that are missing, empty or no text, by the first block of each."""
    for name in spec.text:
        if name != "-":
            next(_source(spec.model_copy(update={"text": (name,)})), None)


def files_of_text(spec: CorpusSpec) -> list[Path]:
    """The files a corpus is read from; none for standard input, packaged text and datasets that are
    not here.
    """
    found: list[Path] = []
    local = [spec.dataset] if spec.dataset is not None and os.path.exists(spec.dataset) else []
    for name in (*spec.text, *local):
        if name == "-" or "\0" in name:
            continue
        if not os.path.isdir(name):
            found.append(Path(name))
        elif name in local:
            found += sorted(path for path in Path(name).rglob("*") if path.is_file())
        else:
            with contextlib.suppress(ValueError):  # reading the folder says what is wrong with it
                found += _folder_files(Path(name), tables=spec.field is not None)
    return found


def _source(spec: CorpusSpec) -> Iterator[Piece]:
    if spec.dataset is not None:
        yield from _dataset(spec.dataset, spec.split, spec.field)
    elif spec.packaged is not None:
        yield from ((True, text) for text in packaged_documents(spec.packaged))
    for name in spec.text:
        if name == "-":
            yield from _stdin(spec.encoding, spec.field)
        elif not name or "\0" in name:
            raise ValueError(
                f"text: expected the name of a file, got {name!r}; give a file, a directory or '-'"
            )
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
        kinds = f"tables ({_tables()})" if tables else "text files (.txt, .md, .py, ...)"
        raise ValueError(
            f"{_show(folder)}: expected a directory with {kinds}, got {seen} other files; name the"
            " files themselves"
        )
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
                yield from _parquet(path, field)
                return
            with _decoded(stream, name, encoding) as text:
                if kind in TABLES:
                    yield from TABLES[kind](text, name, field)
                    return
                if field is not None and not listed:
                    raise ValueError(
                        f"{name}: field '{field}' was asked for, but a field needs a table"
                        f" ({_tables()}); leave the field out"
                    )
                yield from _plain(text, name, must=not listed)
    except OSError as cause:
        advice = "pipe it into '-' instead" if "pipe" in str(cause) else "give a readable text file"
        raise ValueError(f"{name}: cannot be read: {cause.strerror or cause}; {advice}") from cause


def _stdin(encoding: str, field: str | None) -> Iterator[Piece]:
    """Standard input: one document, or JSON Lines when a field is asked for."""
    name, stream = "standard input", getattr(sys.stdin, "buffer", None)
    if stream is None or stream.closed:
        raise ValueError(f"{name}: it is closed; give a file, or pipe text into '-'")
    with _decoded(stream, name, encoding) as text:
        yield from _plain(text, name, must=True) if field is None else _json(text, name, field)


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
        raise ValueError(
            f"{name}: expected {encoding} text, got byte 0x{cause.object[cause.start]:02x}{place};"
            f" {BINARY if binary else advice}"
        ) from cause
    finally:
        text.detach()
        data.detach()


def _refuse_binary(head: bytes, name: str, encoding: str) -> None:
    """Refuse what its first bytes show to be something else."""
    expected = f"{name}: expected {encoding} text, got"
    for likely, marks in MARKS.items():
        if head.startswith(marks):
            raise ValueError(
                f"{expected} the byte order mark of {likely}; set encoding to {likely}"
            )
    if b"\0" in head:
        # UTF-16 without a mark: text of mostly one script has its zeros on one side of the pairs
        even, odd = head[::2].count(0), head[1::2].count(0)
        advice = BINARY
        if max(even, odd) >= max(4, len(head) // 16) and min(even, odd) <= max(even, odd) // 8:
            advice = f"set encoding to utf-16-{'le' if odd > even else 'be'}, which it looks like"
        raise ValueError(f"{expected} a zero character near byte {head.find(0)}; {advice}")


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
        what = "white space alone" if held else "an empty file"
        raise ValueError(f"{name}: expected text, got {what}; give a file with text")


# ---- Tables: one document per row, the text in one field


def _json(text: io.TextIOWrapper, name: str, field: str | None) -> Iterator[Piece]:
    """One value a line, or one array over all lines: strings, or objects with the field."""
    number = 0
    for number, line in enumerate(text, 1):
        place = f"{name}, line {number}"
        if re.match(r"\s*\[\s*($|[{\"])", line):
            values = enumerate(_parsed(line + text.read(), place), 1)
            yield from ((True, _member(value, field, f"{name}, item {i}")) for i, value in values)
            return
        if line.strip():
            yield True, _member(_parsed(line, place), field, place)
    if number == 0:
        raise ValueError(
            f"{name}: expected JSON Lines, got an empty file; give a file with one object a line"
        )


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise ValueError(
            f"{place}: expected JSON, one object a line or one array, got {text.strip()[:40]!r}"
            f" ({str(cause)[:80]}); mend the line"
        ) from cause


def _member(value: Any, field: str | None, place: str) -> str:
    if isinstance(value, str) and field is None:
        return value
    if not isinstance(value, dict):
        raise ValueError(
            f"{place}: expected an object with a field of text, got {type(value).__name__}; mend"
            " the file"
        )
    chosen = _field(field, list(value), place)
    return _string(value[chosen], f"{place}, field '{chosen}'")


def _string(value: Any, place: str) -> str:
    """The text of a field; a missing value is an empty one."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(
            f"{place}: expected a string, got {type(value).__name__}; name a field that holds text"
        )
    return value


def _field(field: str | None, names: list[str], place: str) -> str:
    """The field asked for, else ``text``."""
    wanted = "text" if field is None else field
    if wanted not in names:
        shown = ", ".join(_show(name)[:40] for name in names[:12]) or "none"
        raise ValueError(
            f"{place}: expected a field '{wanted}', got the fields {shown}; set field to one of"
            " them"
        )
    return wanted


def _csv(
    text: io.TextIOWrapper, name: str, field: str | None, delimiter: str = ","
) -> Iterator[Piece]:
    """One document a row; the first row names the fields; quoted fields may hold line ends."""
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        names = next(reader, [])
        if not names:
            raise ValueError(f"{name}: expected names of fields, got an empty file; give rows")
        column = names.index(_field(field, names, name))
        for row in filter(None, reader):
            if len(row) != len(names):
                raise ValueError(
                    f"{name}, line {reader.line_num}: expected {len(names)} fields, got"
                    f" {len(row)}; mend the row"
                )
            yield True, row[column]
    except csv.Error as cause:
        raise ValueError(
            f"{name}, line {reader.line_num}: expected rows of fields, got bad quoting ({cause});"
            " mend it"
        ) from cause


def _parquet(path: Path, field: str | None) -> Iterator[Piece]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    name, rows = _show(path), itertools.count(1)
    try:
        with pq.ParquetFile(path) as table:
            chosen = _field(field, list(table.schema_arrow.names), name)
            for batch in table.iter_batches(ROWS, columns=[chosen]):
                for value in batch.column(0).to_pylist():
                    yield True, _string(value, f"{name}, row {next(rows)}, field '{chosen}'")
    except (pa.ArrowException, UnicodeDecodeError) as cause:
        raise ValueError(
            f"{name}: expected a Parquet table of text, got what cannot be read"
            f" ({' '.join(str(cause).split())[:120]}); mend it"
        ) from cause


TABLES: dict[str, Callable[..., Iterator[Piece]]] = {
    ".jsonl": _json,
    ".ndjson": _json,
    ".json": _json,
    ".csv": _csv,
    ".tsv": functools.partial(_csv, delimiter="\t"),
    ".parquet": _parquet,
}


def _tables() -> str:
    return ", ".join(sorted(TABLES))


def _show(name: str | Path) -> str:
    """A name on one line, whatever characters it holds."""
    return printable(str(name))


def _dataset(dataset: str, split: str, field: str | None) -> Iterator[Piece]:
    """Rows of a dataset as they arrive; only data files are read, never code of the dataset."""
    try:
        import datasets
    except ImportError as cause:
        raise ValueError(
            "dataset: the package datasets is not installed; pip install 'esscher[hf]'"
        ) from cause
    name, _, config = (dataset, "", "") if os.path.exists(dataset) else dataset.partition(":")

    def rows() -> Iterator[dict[str, Any]]:
        try:
            with quiet():
                found = iter(
                    datasets.load_dataset(name, config or None, split=split, streaming=True)
                )
                first = next(found, None)
            if first is not None:
                yield first
                yield from found
        except Exception as cause:  # whatever the hub, the files or their readers raise
            raise ValueError(
                f"dataset {_show(dataset)}: split '{split}' cannot be read ({type(cause).__name__}:"
                f" {' '.join(str(cause).split())[:160]}); check its name ('name' or 'name:config'),"
                " the split and the network, or give files with text"
            ) from cause

    for number, row in enumerate(rows(), 1):
        place = f"dataset {_show(dataset)}, row {number}"
        chosen = _field(field, list(row), place)
        yield True, _string(row[chosen], f"{place}, field '{chosen}'")


# ---- Text that is on every machine


def packaged_documents(domain: str) -> Iterator[str]:
    """``prose``: Python's manual by topic; ``code``: its standard library by file; ``legal``:
    licences by distribution.

    In the order of their names. Prose and code are fixed by the version of Python, licences by what
    is installed.
    """
    return {"prose": _prose, "code": _code, "legal": _legal}[domain]()


def _prose() -> Iterator[str]:
    topics = pydoc_data.topics.topics
    return (topics[name] for name in sorted(topics))


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
