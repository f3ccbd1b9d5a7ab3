"""Where the text comes from: files, standard input, a dataset by name, or text that is on every
machine.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import hashlib
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
from pathlib import Path, PurePosixPath
from typing import Any

from esscher.corpus.spec import CorpusSpec
from esscher.hf.package import quiet
from esscher.runs.files import open_regular

LICENCE = re.compile(r"licen[cs]e|copying|copyright|notice", re.IGNORECASE)
NOT_CODE = {"pydoc_data"}  # the prose
TESTS = {"test", "tests", "idle_test"}


def packaged_documents(domain: str) -> Iterator[str]:
    """``prose``: Python's manual by topic; ``code``: its standard library by file; ``legal``:
    licences by distribution.

    The order is that of the names. Prose and code are fixed by the version of Python, licences by
    what is installed.
    """
    return {"prose": _prose, "code": _code, "legal": _legal}[domain]()


def _prose() -> Iterator[str]:
    topics = pydoc_data.topics.topics
    return (topics[name] for name in sorted(topics))


def _code() -> Iterator[str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    wanted = sys.stdlib_module_names - NOT_CODE
    # not what else was installed beside them
    tops = [path for path in folder.iterdir() if path.stem in wanted]
    paths = [path for path in tops if path.suffix == ".py"]
    paths += [path for top in tops if top.is_dir() for path in top.rglob("*.py")]
    chosen = [path for path in paths if not TESTS & set(path.relative_to(folder).parts)]
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
        name = distribution.metadata["Name"]
        if name:  # a broken installation may have none
            by_name.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution)
    for name in sorted(by_name):
        licences = [file for file in by_name[name].files or () if _is_licence(file)]
        for file in sorted(licences, key=str):
            path = Path(str(by_name[name].locate_file(file)))
            if not path.is_file():
                continue
            text = _licence_text(path.read_bytes())
            key = hashlib.sha256(" ".join(text.split()).encode("utf-8")).digest()
            if key not in seen:
                seen.add(key)
                yield text
    if not seen:
        raise ValueError(
            "packaged legal: no installed distribution has a licence file; give files with --text"
        )


def _is_licence(file: PurePosixPath) -> bool:
    """In the distribution's own metadata, so that no source file of that name is taken."""
    inside = any(part.endswith((".dist-info", ".egg-info")) for part in file.parts[:-1])
    return inside and (LICENCE.search(file.name) is not None or "licenses" in file.parts[:-1])


def _licence_text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


# ---- Documents out of tables: JSON Lines, JSON, CSV, TSV and Parquet, one per row, the text in
# one field.

Piece = tuple[bool, str]  # a stretch of text, and whether a new document starts with it
ROWS = 512
TABLES = frozenset({".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"})


def show(name: str | Path) -> str:
    """A name on one line, whatever characters it holds."""
    text = str(name)
    return text if text.isprintable() else ascii(text)


def as_text(value: Any, place: str) -> str:
    """The string of a field; a missing value is an empty one; anything else is refused."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(
            f"{place}: expected a string, got {type(value).__name__}; name a field that holds text"
        )
    return value


def _lines(blocks: Iterable[str]) -> Iterator[str]:
    """Lines with their ends; a line may be longer than any block."""
    held: list[str] = []
    for block in blocks:
        *whole, rest = block.split("\n")
        for line in whole:
            held.append(line)
            yield "".join(held) + "\n"
            held = []
        held.append(rest)
    if any(held):
        yield "".join(held)


def json_values(blocks: Iterable[str], name: str, field: str | None) -> Iterator[Piece]:
    """One value a line, or one array over all lines: strings, or objects with the field."""
    number, lines = 0, _lines(blocks)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if re.match(r"\s*\[\s*($|[{\"])", line):
            # An array has no end before the last line: it is read whole.
            rest = line + "".join(lines)
            for place, value in enumerate(_parsed(rest, f"{name}, line {number}"), 1):
                yield True, _member(value, field, f"{name}, item {place}")
            return
        place_of_line = f"{name}, line {number}"
        yield True, _member(_parsed(line, place_of_line), field, place_of_line)
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
    chosen = chosen_field(field, list(value), place)
    return as_text(value[chosen], f"{place}, field '{chosen}'")


def chosen_field(field: str | None, names: list[str], place: str) -> str:
    """The field asked for, else ``text``; an unknown one is refused with the list of those there
    are.
    """
    wanted = "text" if field is None else field
    if wanted not in names:
        shown = ", ".join(show(name)[:40] for name in names[:12]) or "none"
        raise ValueError(
            f"{place}: expected a field '{wanted}', got the fields {shown}; set field to one of"
            " them"
        )
    return wanted


def csv_rows(
    blocks: Iterable[str], name: str, field: str | None, delimiter: str
) -> Iterator[Piece]:
    """One document a row; the first row names the fields; quoted fields may hold line ends."""
    reader = csv.reader(_lines(blocks), delimiter=delimiter, strict=True)
    header = _row(reader, name)
    if header is None:
        raise ValueError(
            f"{name}: expected a first row with names of fields, got an empty file; give a file"
            " with rows"
        )
    column = header.index(chosen_field(field, header, name))
    while (row := _row(reader, name)) is not None:
        if not row:
            continue
        if len(row) != len(header):
            raise ValueError(
                f"{name}, line {reader.line_num}: expected {len(header)} fields, got {len(row)};"
                " mend the row"
            )
        yield True, row[column]


def _row(reader: Any, name: str) -> list[str] | None:
    """The next row, however long its fields are; the module's own limit is put back each time."""
    limit = csv.field_size_limit(2**31 - 1)
    try:
        return next(reader, None)
    except csv.Error as cause:
        raise ValueError(
            f"{name}, line {reader.line_num}: expected rows of fields, got bad quoting ({cause});"
            " mend it"
        ) from cause
    finally:
        csv.field_size_limit(limit)


def parquet_rows(path: Path, field: str | None) -> Iterator[Piece]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            chosen = chosen_field(field, list(table.schema_arrow.names), show(path))
            row = 0
            for batch in table.iter_batches(ROWS, columns=[chosen]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield True, as_text(value, f"{show(path)}, row {row}, field '{chosen}'")
    except (pa.ArrowException, UnicodeDecodeError) as cause:
        reason = " ".join(str(cause).split())[:120]
        raise ValueError(
            f"{show(path)}: expected a Parquet table of text, got what cannot be read ({reason});"
            " mend it"
        ) from cause


# ---- Text out of files and streams, block by block: what is not text is refused with its name
# and what to do.

BLOCK = 1 << 20
# What is read when a directory is given and no field; any other file is read when it is named
# itself.
TEXTS = frozenset(
    {
        ".txt",
        ".text",
        ".md",
        ".markdown",
        ".rst",
        ".tex",
        ".org",
        ".adoc",
        ".html",
        ".htm",
        ".xml",
        ".log",
    }
    | {
        ".py",
        ".pyi",
        ".c",
        ".h",
        ".cc",
        ".cpp",
        ".hpp",
        ".cs",
        ".java",
        ".kt",
        ".scala",
        ".js",
        ".ts",
        ".go",
        ".rs",
    }
    | {".rb", ".php", ".pl", ".lua", ".r", ".jl", ".m", ".f90", ".sh", ".sql", ".hs", ".ml", ".el"}
)
MARKS = (  # the longer marks first: UTF-32's begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
SIGNATURES = (
    (b"\x1f\x8b", "gzip"),
    (b"PK\x03\x04", "zip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstandard"),
    (b"%PDF-", "PDF"),
    (b"PAR1", "Parquet"),
    (b"\x89PNG", "PNG"),
    (b"\x7fELF", "program"),
)


def folder_files(folder: Path, tables: bool) -> list[Path]:
    """Files of a directory and below it, in the order of their names: tables when a field is asked
    for, else texts.

    Hidden names are left out, and directories behind symbolic links are not entered, so that no
    loop can arise.
    """
    wanted = TABLES if tables else TEXTS
    found, seen = [], 0
    for parent, folders, files in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        visible = [name for name in files if not name.startswith(".")]
        seen += len(visible)
        found += [Path(parent, name) for name in visible if Path(name).suffix.lower() in wanted]
    if not found:
        kinds = (
            "tables (" + ", ".join(sorted(TABLES)) + ")"
            if tables
            else "text files (.txt, .md, .py, ...)"
        )
        raise ValueError(
            f"{show(folder)}: expected a directory with {kinds}, got {seen} other files; name the"
            " files themselves"
        )
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def _raise(cause: OSError) -> None:
    raise ValueError(
        f"{show(cause.filename)}: cannot be read: {cause.strerror}; give a directory that can be"
        " listed"
    ) from cause


def file_pieces(
    path: Path, encoding: str, field: str | None, *, listed: bool = False
) -> Iterator[Piece]:
    """The documents of one file: the whole text, or one per row of a table. ``listed``: found in a
    directory.
    """
    try:
        with open_regular(path) as stream:
            if path.suffix.lower() == ".parquet":
                yield from parquet_rows(path, field)
                return
            blocks = decoded(lambda size: stream.read(size) or b"", show(path), encoding)
            match path.suffix.lower():
                case ".jsonl" | ".ndjson" | ".json":
                    yield from json_values(blocks, show(path), field)
                case ".csv":
                    yield from csv_rows(blocks, show(path), field, ",")
                case ".tsv":
                    yield from csv_rows(blocks, show(path), field, "\t")
                case _:
                    if field is not None and not listed:
                        raise ValueError(
                            f"{show(path)}: field '{field}' was asked for, but a field needs a"
                            f" table ({', '.join(sorted(TABLES))}); leave the field out"
                        )
                    yield from _plain(blocks, show(path), must=not listed)
    except OSError as cause:
        advice = "pipe it into '-' instead" if "pipe" in str(cause) else "give a readable text file"
        raise ValueError(
            f"{show(path)}: cannot be read: {cause.strerror or cause}; {advice}"
        ) from cause


def stdin_pieces(encoding: str, field: str | None) -> Iterator[Piece]:
    """Standard input: one document, or JSON Lines when a field is asked for."""
    buffer = getattr(sys.stdin, "buffer", None)
    if buffer is None or buffer.closed:
        raise ValueError("standard input: it is closed; give a file, or pipe text into '-'")
    blocks = decoded(buffer.read, "standard input", encoding)
    return (
        _plain(blocks, "standard input", must=True)
        if field is None
        else json_values(blocks, "standard input", field)
    )


def decoded(read: Callable[[int], bytes], name: str, encoding: str) -> Iterator[str]:
    """Text of a byte stream in blocks of about a megabyte, without its byte order mark."""
    decoder = codecs.getincrementaldecoder(encoding)()
    offset, first = 0, True
    while True:
        block = read(BLOCK)
        if first:
            _refuse_foreign(block, name, encoding)
        waiting = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as cause:
            raise ValueError(_not_decoded(cause, offset - waiting, name, encoding)) from cause
        if "\0" in text:
            likely = _zero_pattern(block)
            advice = (
                f"set encoding to {likely}, which it looks like"
                if likely
                else "it looks binary; give a text file"
            )
            near = offset + max(0, block.find(b"\0"))
            raise ValueError(
                f"{name}: expected {encoding} text, got a zero character near byte {near}; {advice}"
            )
        if first:
            text = text.removeprefix("\ufeff")
        if text:
            yield text
        if not block:
            return
        offset, first = offset + len(block), False


def _refuse_foreign(block: bytes, name: str, encoding: str) -> None:
    """Refuse what says by its first bytes that it is something else."""
    own = codecs.lookup(encoding).name
    for mark, likely in MARKS:
        if block.startswith(mark) and not own.startswith(("utf-16", "utf-32")):
            raise ValueError(
                f"{name}: expected {encoding} text, got the byte order mark of {likely}; set"
                f" encoding to {likely}"
            )
    for signature, kind in SIGNATURES:
        if block.startswith(signature) and not own.startswith(("utf-16", "utf-32")):
            raise ValueError(
                f"{name}: expected {encoding} text, got a {kind} file; unpack or convert it to text"
                " first"
            )


def _zero_pattern(block: bytes) -> str | None:
    """UTF-16 without a mark: text of mostly one script has its zero bytes on one side of the
    pairs.
    """
    head = block[:4096]
    even, odd = head[::2].count(0), head[1::2].count(0)
    if max(even, odd) < max(4, len(head) // 16) or min(even, odd) > max(even, odd) // 8:
        return None
    return "utf-16-le" if odd > even else "utf-16-be"


def _not_decoded(cause: UnicodeDecodeError, offset: int, name: str, encoding: str) -> str:
    sample = cause.object[max(0, cause.start - 200) : cause.start + 200]
    controls = sum(byte < 9 or 13 < byte < 32 for byte in sample)
    advice = (
        "it looks binary; give a text file"
        if controls
        else "set encoding to what it was written in (cp1252, latin-1, ...)"
    )
    return (
        f"{name}: expected {encoding} text, got byte 0x{cause.object[cause.start]:02x} at"
        f" {offset + cause.start}; {advice}"
    )


def _plain(blocks: Iterable[str], name: str, *, must: bool) -> Iterator[Piece]:
    """All of a file as one document; white space alone is no document."""
    held: list[str] = []
    started = False
    for block in blocks:
        if started:
            yield False, block
            continue
        held.append(block)
        if not block.isspace():
            yield True, "".join(held)
            held, started = [], True
    if must and not started:
        raise ValueError(
            f"{name}: expected text, got {'white space alone' if held else 'an empty file'}; give a"
            " file with text"
        )


# ---- Where the text comes from: files, standard input, a dataset by name, or text that is on
# every machine.

SURROGATES = re.compile("[\ud800-\udfff]")


def files_of_text(spec: CorpusSpec) -> list[Path]:
    """The files a corpus is read from; none for standard input, packaged text and datasets that are
    not here.
    """
    found: list[Path] = []
    local = [spec.dataset] if spec.dataset is not None and os.path.exists(spec.dataset) else []
    for name in [name for name in (*spec.text, *local) if name != "-" and "\0" not in name]:
        if not os.path.isdir(name):
            found.append(Path(name))
        elif name in local:
            found += sorted(path for path in Path(name).rglob("*") if path.is_file())
        else:
            with contextlib.suppress(ValueError):  # who reads the folder says what is wrong with it
                found += folder_files(Path(name), tables=spec.field is not None)
    return found


def check_text(spec: CorpusSpec) -> None:
    """Refuse files and folders that are missing, empty or no text, by the first block of each."""
    for name in spec.text:
        if name != "-":
            next(_source(spec.model_copy(update={"text": (name,)})), None)


def read_documents(spec: CorpusSpec) -> Iterator[str]:
    """Documents one by one; a file is read when its turn comes. What cannot be read is a ValueError
    of one line.
    """
    number = 0

    def numbered(piece: Piece) -> int:
        nonlocal number
        number += piece[0]
        return number

    for _, pieces in itertools.groupby(read_pieces(spec), numbered):
        yield "".join(text for _, text in pieces)


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
        yield starts, _encodable(text)
    if count == 0:
        raise ValueError(
            "corpus: expected text, got documents without any; give a source with text"
        )


def _encodable(text: str) -> str:
    """Half a surrogate pair, which JSON can hold and UTF-8 cannot, becomes the replacement
    character.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return SURROGATES.sub("\ufffd", text)
    return text


def _source(spec: CorpusSpec) -> Iterator[Piece]:
    if spec.dataset is not None:
        yield from _dataset(spec.dataset, spec.split, spec.field)
    elif spec.packaged is not None:
        yield from ((True, text) for text in packaged_documents(spec.packaged))
    for name in spec.text:
        if name == "-":
            yield from stdin_pieces(spec.encoding, spec.field)
        elif os.path.isdir(name):
            for path in folder_files(Path(name), tables=spec.field is not None):
                yield from file_pieces(path, spec.encoding, spec.field, listed=True)
        elif not name or "\0" in name:
            raise ValueError(
                f"text: expected the name of a file, got {name!r}; give a file, a directory or '-'"
            )
        else:
            yield from file_pieces(Path(name), spec.encoding, spec.field)


def _dataset(dataset: str, split: str, field: str | None) -> Iterator[Piece]:
    """Rows of a dataset as they arrive; only data files are read, never code of the dataset."""
    try:
        import datasets
    except ImportError as cause:
        raise ValueError(
            "dataset: the package datasets is not installed; pip install 'esscher[hf]'"
        ) from cause
    name, _, config = (dataset, "", "") if os.path.exists(dataset) else dataset.partition(":")
    failures = (
        OSError,
        ValueError,
        RuntimeError,
        LookupError,
        TypeError,
        ImportError,
        datasets.exceptions.DatasetsError,
    )
    try:
        with quiet():
            rows = iter(datasets.load_dataset(name, config or None, split=split, streaming=True))
            row = next(rows, None)
    except failures as cause:
        raise ValueError(_not_loaded(dataset, split, cause)) from cause
    number = 0
    while row is not None:
        number += 1
        place = f"dataset {show(dataset)}, row {number}"
        chosen = chosen_field(field, list(row), place)
        yield True, as_text(row[chosen], f"{place}, field '{chosen}'")
        try:
            row = next(rows, None)
        except failures as cause:
            raise ValueError(_not_loaded(dataset, split, cause)) from cause


def _not_loaded(dataset: str, split: str, cause: BaseException) -> str:
    reason = " ".join(str(cause).split())[:160]
    return (
        f"dataset {show(dataset)}: split '{split}' cannot be read ({type(cause).__name__}:"
        f" {reason}); check its name ('name' or 'name:config'), the split and the network, or give"
        " files with text"
    )
