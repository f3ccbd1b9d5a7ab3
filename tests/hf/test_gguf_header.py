"""Damaged and hostile GGUF files: one line, exit 2, and no more memory than the file has bytes."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from esscher.hf.gguf import read_header
from tests.cli.commands import run
from tests.models.tiny_gguf import model_of, write_gguf

BIG = 1 << 62


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(
        tmp_path_factory.mktemp("gguf") / "model.gguf", "llama", model_of("llama"), "Q4_0"
    ).read_bytes()


def text(word: str) -> bytes:
    return struct.pack("<Q", len(word)) + word.encode()


def header(tensors: int, settings: int, *rest: bytes) -> bytes:
    """The beginning of a file, and the name of its architecture."""
    return b"".join(
        [
            b"GGUF",
            struct.pack("<IQQ", 3, tensors, settings),
            setting("general.architecture", "llama"),
            *rest,
        ]
    )


def setting(name: str, value: str) -> bytes:
    return text(name) + struct.pack("<I", 8) + text(value)


def tensor(name: str, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def array(name: str, kind: int, count: int, content: bytes = b"") -> bytes:
    return text(name) + struct.pack("<IIQ", 9, kind, count) + content


ROOM = bytes(256)
END = "buffer is smaller than requested size; the file is cut off or damaged"
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot mmap an empty file; the file is cut off"),
    "short": (b"GGUF\3\0\0\0", "buffer is smaller than requested size; the file is cut off"),
    "magic": (b"PK\3\4" + ROOM, "GGUF magic invalid"),
    "version 1": (b"GGUF" + struct.pack("<I", 1) + ROOM, "version 1 which we cannot handle"),
    "version 99": (b"GGUF" + struct.pack("<I", 99) + ROOM, "version 99 which we cannot handle"),
    "other byte order": (
        b"GGUF" + struct.pack(">I", 3) + ROOM,
        "no general.architecture",
    ),
    "tensors": (
        header(BIG, 1, ROOM),
        END,
    ),
    "settings": (
        header(0, BIG, ROOM),
        "Duplicate",
    ),
    "long name": (
        header(0, 2, struct.pack("<Q", BIG), ROOM),
        END,
    ),
    "long list": (
        header(0, 2, array("a", 0, BIG), ROOM),
        END,
    ),
    "list of words": (
        header(0, 2, array("a", 8, BIG), ROOM),
        END,
    ),
    "long word": (
        header(0, 2, array("a", 8, 1, struct.pack("<Q", BIG)), ROOM),
        END,
    ),
    "word of bytes": (
        header(0, 2, array("a", 8, 1, struct.pack("<Q", 2) + b"\xff\xff"), ROOM),
        "codec can't decode",
    ),
    "list of lists": (
        header(0, 2, array("a", 9, 1), ROOM),
        "expected a number of layers that 0 tensors can make",
    ),
    "type of a setting": (
        header(0, 2, text("a") + struct.pack("<I", 77), ROOM),
        "77) is not a valid GGUFValueType",
    ),
    "no text": (header(0, 2, struct.pack("<Q", 2) + b"\xff\xff", ROOM), "codec can't decode"),
    "twice": (
        header(0, 2, setting("general.architecture", "x"), ROOM),
        "Duplicate general.architecture",
    ),
    "no architecture": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + setting("a", "b"),
        "no general.architecture",
    ),
    "other architecture": (
        header(0, 1, ROOM).replace(b"llama", b"rwkv7"),
        "the architecture 'rwkv7' is not read from GGUF",
    ),
    "a part": (
        header(0, 2, text("split.count") + struct.pack("<IH", 2, 3), ROOM),
        "one of 3 parts of a model",
    ),
    "alignment": (
        header(0, 2, text("general.alignment") + struct.pack("<II", 4, 0), ROOM),
        "must be a non-zero power of two",
    ),
    "sizes": (
        header(1, 1, text("t") + struct.pack("<I", 4_000_000_000), ROOM),
        END,
    ),
    "huge tensor": (
        header(1, 1, tensor("t", (1 << 40, 1 << 40), 0, 0), ROOM),
        "cannot reshape array of size 0",
    ),
    "far tensor": (
        header(1, 1, tensor("t", (4,), 0, BIG), ROOM),
        "offset must be non-negative and no greater than buffer length",
    ),
    "no numbers": (
        header(1, 1, tensor("t", (0,), 0, 0), ROOM),
        "expected a number of layers that 1 tensors can make",
    ),
    "half a block": (
        header(1, 1, tensor("t", (33,), 2, 0), ROOM),
        "is not a multiple of Q4_0 block size",
    ),
    "type of a tensor": (
        header(1, 1, tensor("t", (4,), 999, 0), ROOM),
        "999) is not a valid GGMLQuantizationType",
    ),
    "two in one place": (
        header(2, 1, tensor("t", (32,), 0, 0), tensor("u", (32,), 0, 64), ROOM),
        "expected a number of layers that 2 tensors can make",
    ),
    "tensor twice": (
        header(2, 1, tensor("t", (4,), 0, 0), tensor("t", (4,), 0, 64), ROOM),
        "duplicated tensor with name t",
    ),
    "no layers": (
        header(0, 1, ROOM),
        "expected a number of layers that 0 tensors can make, got None",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_one_line_and_exit_2(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, said = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    with contextlib.suppress(ValueError):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6  # a package imported on the way; a count of the file would be 10^18
    code, out, err = run(["describe", str(path)], capsys)
    assert (code, out) == (2, "")
    assert err.startswith(f"esscher: {path}: ")
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize("part", [0.01, 0.1, 0.5, 0.9, 0.999])
def test_a_file_that_is_cut_off_is_refused(
    part: float, whole: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole[: int(part * len(whole))])
    code, out, err = run(["probe", str(path)], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "the file is cut off or damaged" in err or "it is cut off or damaged" in err


def test_any_damage_is_a_value_error(whole: bytes, tmp_path: Path) -> None:
    """Bytes changed at random in header and table, where every number is a count, a length or a
    type.
    """
    generator = random.Random(3)
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    end = len(whole) - sum(int(tensor.n_bytes) for tensor in read_header(path).tensors)
    said = []
    for _ in range(120):
        content = bytearray(whole)
        for _ in range(generator.choice((1, 2, 8))):
            content[generator.randrange(end)] = generator.choice(
                (0, 1, 0x7F, 0xFF, generator.randrange(256))
            )
        path.write_bytes(content)
        try:
            read_header(path)
        except ValueError as cause:
            said.append(str(cause))
    assert len(said) > 20
    assert [line for line in said if "\n" in line or len(line) > 700] == []


@pytest.mark.parametrize("missing", [["gguf"], ["accelerate"], ["gguf", "accelerate"]])
@pytest.mark.parametrize("command", ["probe", "describe"])
def test_without_the_extra_the_command_that_installs_it_is_said(
    missing: list[str],
    command: str,
    whole: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import importlib.util

    (tmp_path / "model.gguf").write_bytes(whole)
    find: Callable[..., object] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name in missing else find(name, *more),
    )
    code, out, err = run([command, str(tmp_path / "model.gguf")], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert (
        f"GGUF files need {' and '.join(missing)}, not installed here: pip install gguf accelerate"
        in err
    )


def test_a_file_without_a_tokenizer_cannot_be_probed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", model_of("llama"), words=None)
    code, out, err = run(["probe", str(path)], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no tokenizer, so no text can be given to it" in err


def test_weights_that_are_not_finite_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of("llama")
    model.layers[1].self_attn.k_proj.weight.data[3, 5] = float("nan")
    code, out, err = run(
        ["probe", str(write_gguf(tmp_path / "model.gguf", "llama", model))], capsys
    )
    assert (code, out, err.count("\n")) == (2, "", 2)
    assert err.splitlines()[0].endswith("; reading the weights")
    assert "weight model.layers.1.self_attn.k_proj.weight holds 1 NaN or infinite" in err


@pytest.mark.parametrize("name", ["no-such.gguf", "folder/no-such.gguf", "./no-such.gguf"])
def test_a_file_that_is_not_there_is_not_sought_on_the_hub(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(["probe", name], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"esscher: {name}: no such model folder or GGUF file; give ")
