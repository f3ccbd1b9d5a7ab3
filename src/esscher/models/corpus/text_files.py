"""Text out of files and streams, block by block: what is not text is refused with its name and what
to do.
"""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from esscher.models.corpus.table_files import (
    TABLES,
    Piece,
    csv_rows,
    json_values,
    parquet_rows,
    show,
)
from esscher.runs.files import open_regular

__all__ = ["TEXTS", "file_pieces", "folder_files", "stdin_pieces"]

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
