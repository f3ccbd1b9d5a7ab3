"""The header of a GGUF file, read within the bounds of the file: no count in it can cost more
memory than its bytes.

A GGUF file is: "GGUF", a version, the number of tensors and of settings; the settings (name, type,
value); the table of tensors (name, sizes, type, where); then their data. Libraries believe these
numbers; this reader checks each of them first.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from esscher.models.huggingface.package import gguf
from esscher.runs.files import open_regular

__all__ = ["GgufHeader", "GgufTensor", "read_header"]

VERSIONS = (2, 3)
SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
STRING, ARRAY = 8, 9
# numbers of an array that are kept; of longer ones and of lists of words only the length is
KEPT = 4096
DIMENSIONS = 4
ALIGNMENT = 32  # of the data, where the file does not say


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file: sizes as there (the fastest first), its type by name (F32, Q4_1, ...),
    and where its bytes are.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    begin: int
    bytes: int

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class GgufHeader:
    """Settings and tensors of a file; of a list of words only its length is here."""

    architecture: str
    settings: dict[str, Any]
    tensors: tuple[GgufTensor, ...]

    def kinds(self) -> list[str]:
        """Types of the tensors, those that hold most numbers first."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors:
            counts[tensor.kind] += tensor.numbers
        return [kind for kind, _ in counts.most_common()]


class _Cursor:
    """A place in the file that cannot leave it."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data, self.at = data, at

    def skip(self, size: int) -> int:
        """Where the next ``size`` bytes begin."""
        begin = self.at
        if size > len(self.data) - begin:
            raise ValueError(
                f"the header asks for {size} bytes at byte {begin} of {len(self.data)}; the file is"
                " cut off or damaged"
            )
        self.at = begin + size
        return begin

    def number(self, form: str) -> Any:
        return struct.unpack_from(form, self.data, self.skip(struct.calcsize(form)))[0]

    def count(self, what: str, least: int) -> int:
        """A number of things that take at least so many bytes each."""
        found: int = self.number("<Q")
        if found * least > len(self.data) - self.at:
            raise ValueError(
                f"the header counts {found} {what}, more than the file has room for; it is cut off"
                " or damaged"
            )
        return found

    def text(self) -> str:
        size: int = self.number("<Q")
        begin = self.skip(size)
        try:
            return self.data[begin : begin + size].decode("utf-8")
        except UnicodeDecodeError as cause:
            raise ValueError(
                f"the word at byte {begin} is not text; the file is damaged"
            ) from cause

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise ValueError(
                f"a setting of type {kind} at byte {self.at}, which GGUF does not have; the file is"
                " damaged"
            )
        return self._array(self.number("<I"))

    def _array(self, kind: int) -> Any:
        if kind in SCALARS:
            size = struct.calcsize(SCALARS[kind])
            count = self.count("numbers of a list", size)
            begin = self.skip(count * size)
            return (
                struct.unpack_from(f"<{count}{SCALARS[kind][1]}", self.data, begin)
                if count <= KEPT
                else count
            )
        if kind != STRING:
            raise ValueError(f"a list of type {kind} at byte {self.at}, which is not read")
        count = self.count("words of a list", 8)
        for _ in range(count):
            self.text()
        return count


def read_header(path: Path) -> GgufHeader:
    """The header of a file, checked against the file's size; a mistake is a ValueError of one
    line.
    """
    try:
        with open_regular(path) as stream:
            size = path.stat().st_size
            if size < 24:
                raise ValueError(
                    f"{size} bytes, less than a GGUF header; the file is empty or cut off"
                )
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(data)
    except OSError as cause:
        raise ValueError(f"{path}: {cause.strerror or cause}") from cause
    except ValueError as cause:
        raise ValueError(f"{path}: {cause}") from cause


def _parse(data: mmap.mmap) -> GgufHeader:
    cursor = _Cursor(data, 8)
    if data[:4] != b"GGUF":
        raise ValueError(f"no GGUF file: it begins with {bytes(data[:4])!r}")
    (version,) = struct.unpack_from("<I", data, 4)
    if version not in VERSIONS:
        swapped = struct.unpack_from(">I", data, 4)[0] in VERSIONS
        what = "of a machine with the other order of bytes" if swapped else f"of version {version}"
        raise ValueError(
            f"a GGUF file {what}; versions {VERSIONS[0]} and {VERSIONS[-1]}, low byte first, are"
            " read"
        )
    tensors = cursor.count("tensors", 24)
    settings: dict[str, Any] = {}
    for _ in range(cursor.count("settings", 13)):
        name = cursor.text()
        if name in settings:
            raise ValueError(f"the setting {name} is there twice; the file is damaged")
        settings[name] = cursor.value(cursor.number("<I"))
    architecture = settings.get("general.architecture")
    if not isinstance(architecture, str):
        raise ValueError(
            "no general.architecture among its settings, so there is no knowing what model it is"
        )
    if isinstance(parts := settings.get("split.count"), int) and parts > 1:
        raise ValueError(
            f"one of {parts} parts of a model; join them first: llama-gguf-split --merge"
        )
    return GgufHeader(
        architecture,
        settings,
        _table(cursor, tensors, settings.get("general.alignment", ALIGNMENT)),
    )


def _table(cursor: _Cursor, count: int, alignment: Any) -> tuple[GgufTensor, ...]:
    """The table of tensors; what they hold lies inside the file, no byte of it twice."""
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(
            f"general.alignment: expected a power of two, got {alignment!r}; the file is damaged"
        )
    library = gguf()
    found = [_tensor(cursor, library) for _ in range(count)]
    if len({tensor.name for tensor in found}) < count:
        raise ValueError("a tensor is there twice; the file is damaged")
    end = start = -(-cursor.at // alignment) * alignment
    placed = tuple(replace(tensor, begin=start + tensor.begin) for tensor in found)
    for tensor in sorted(placed, key=lambda tensor: tensor.begin):
        if tensor.begin < end:
            raise ValueError(
                f"the tensor {tensor.name} lies in the place of another; the file is damaged"
            )
        end = tensor.begin + tensor.bytes
        if end > len(cursor.data):
            raise ValueError(
                f"the tensor {tensor.name} ends at byte {end} of {len(cursor.data)}; the file is"
                " cut off or damaged"
            )
    return placed


def _tensor(cursor: _Cursor, library: Any) -> GgufTensor:
    """A tensor; it begins where it does in the data, whose place is not known yet."""
    name = cursor.text()
    dimensions = cursor.number("<I")
    if dimensions > DIMENSIONS:
        raise ValueError(
            f"the tensor {name[:80]!r} has {dimensions} sizes, at most {DIMENSIONS} are possible"
        )
    shape = tuple(cursor.number("<Q") for _ in range(dimensions))
    code, offset = cursor.number("<I"), cursor.number("<Q")
    try:
        kind = library.GGMLQuantizationType(code)
    except ValueError as cause:
        raise ValueError(
            f"the tensor {name[:80]!r} is of type {code}, which the package gguf does not know"
        ) from cause
    numbers, width = library.GGML_QUANT_SIZES[kind]
    if math.prod(shape) < 1 or (shape and shape[0] % numbers):
        raise ValueError(
            f"the tensor {name[:80]!r} of sizes {shape} cannot be of type {kind.name}; the file is"
            " damaged"
        )
    return GgufTensor(name, shape, kind.name, offset, math.prod(shape) // numbers * width)
