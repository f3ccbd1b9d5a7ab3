"""Where the text comes from: files, standard input, a dataset by name, or text that is on every
machine.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from esscher.models.corpus.packaged import packaged_documents
from esscher.models.corpus.spec import CorpusSpec
from esscher.models.corpus.table_files import Piece, as_text, chosen_field, show
from esscher.models.corpus.text_files import file_pieces, folder_files, stdin_pieces
from esscher.models.huggingface.package import quiet

__all__ = ["check_text", "files_of_text", "read_documents", "read_pieces"]

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
