"""Windows hold every token of the text once, in order, whatever the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esscher.corpus import CorpusSpec, Windows, make_windows
from tests.models.tokenizers_for_tests import KINDS, plain_ids, prose, tokenizer

EDGES = {"bert": (1, 1), "gpt2": (0, 0), "llama": (1, 0), "metaspace": (0, 0), "t5": (0, 1)}
REAL = sorted(EDGES)
HOSTILE = [
    "x" * 5000,
    "word " * 2000,
    "\n\n\n".join("a  b\tc" for _ in range(900)),
    "日本語の文章。" * 700,
    "e\u0301 \u0301 \u200d👩‍👩‍👧 \u202e" * 400,
    "a\r\nb " * 1500 + "   ",
    "f(x)=y;" * 1000,
    "<s>[SEP]<|endoftext|> x" * 300,
]


def files(folder: Path, texts: list[str]) -> tuple[str, ...]:
    paths = [folder / f"{number:04d}.txt" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text.encode("utf-8"))
    return tuple(str(path) for path in paths)


def check(made: Windows, kind: str) -> None:
    """One kind a position; special tokens where the model wants them; padding only at the end of a
    window.
    """
    np.testing.assert_array_equal(
        made.text.astype(int) + made.special + made.padding, np.ones_like(made.ids)
    )
    assert np.all(np.diff(made.padding.astype(int), axis=1) >= 0)
    assert made.tokens == made.text.sum() > 0
    assert made.ids.dtype == np.int32
    assert made.ids.min() >= 0
    assert made.ids.max() < len(tokenizer(kind))


def kept(made: Windows, kind: str) -> list[int]:
    """Ids between the edges, special ones that the text spells out included."""
    before, after = EDGES[kind]
    rows = []
    for ids, padding in zip(made.ids, made.padding, strict=True):
        used = int((~padding).sum())
        rows.append(ids[before : used - after])
    return [int(number) for number in np.concatenate(rows)]


@pytest.mark.parametrize("kind", REAL)
@pytest.mark.parametrize("length", [3, 7, 64])
def test_no_token_is_lost_or_doubled(kind: str, length: int) -> None:
    made = make_windows(CorpusSpec(limit=5), tokenizer(kind), length)
    expected = [number for text in prose()[:5] for number in plain_ids(kind, text)]
    assert made.ids[made.text].tolist() == expected
    assert made.documents == 5
    check(made, kind)
    room = length - sum(EDGES[kind])
    assert made.ids.shape == (-(-len(expected) // room), length)
    assert made.padding.sum() == len(made) * room - len(expected)


@pytest.mark.parametrize("kind", REAL)
def test_separate_documents_do_not_share_a_window(kind: str) -> None:
    made = make_windows(CorpusSpec(limit=7, documents="separate"), tokenizer(kind), 61)
    check(made, kind)
    row, room = 0, 61 - sum(EDGES[kind])
    for text in prose()[:7]:
        ids = plain_ids(kind, text)
        rows = -(-len(ids) // room)
        here = slice(row, row + rows)
        assert made.ids[here][made.text[here]].tolist() == ids
        row += rows
    assert row == len(made)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "t5"])
def test_edges_are_those_of_the_tokenizer(kind: str, tmp_path: Path) -> None:
    own = tokenizer(kind)
    text = "the value of a name in the text"
    spec = CorpusSpec(text=files(tmp_path, [text]))
    full = own(text, truncation=False, padding=False)["input_ids"]
    made = make_windows(spec, own, len(full) + 3)
    assert made.ids[0, : len(full)].tolist() == full
    assert made.padding[0].tolist() == [False] * len(full) + [True] * 3
    assert made.special.sum() == sum(EDGES[kind])
    bare = make_windows(spec.model_copy(update={"special": False}), own, len(full))
    assert bare.special.sum() == 0
    assert bare.ids[bare.text].tolist() == plain_ids(kind, text)


@pytest.mark.parametrize("kind", REAL)
@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_documents(kind: str, number: int, tmp_path: Path) -> None:
    text = HOSTILE[number]
    made = make_windows(CorpusSpec(text=files(tmp_path, [text])), tokenizer(kind), 29)
    assert kept(made, kind) == plain_ids(kind, text)
    check(made, kind)


@pytest.mark.parametrize("documents", ["joined", "separate"])
@pytest.mark.parametrize("most", [1, 9, 10, 11, 1000, 20_000])
def test_exactly_so_many_tokens_are_kept(documents: Any, most: int) -> None:
    made = make_windows(CorpusSpec(max_tokens=most, documents=documents), tokenizer("bert"), 12)
    assert made.tokens == most
    expected = [number for text in prose()[:40] for number in plain_ids("bert", text)]
    assert made.ids[made.text].tolist() == expected[:most]


def test_reading_stops_when_there_is_enough(tmp_path: Path) -> None:
    """At most one document beyond is looked at."""
    names = files(tmp_path, ["one two three four five six seven eight nine ten eleven twelve"] * 3)
    Path(names[-1]).unlink()
    spec = CorpusSpec(text=names, max_tokens=5)
    assert make_windows(spec, tokenizer("bert"), 8).tokens == 5
    with pytest.raises(ValueError, match="cannot be read"):
        make_windows(spec.model_copy(update={"max_tokens": 50}), tokenizer("bert"), 8)


def test_special_tokens_in_the_text_are_no_text(tmp_path: Path) -> None:
    spec = CorpusSpec(text=files(tmp_path, ["left [SEP] right [PAD] [CLS] \U000f0000 end"]))
    made = make_windows(spec, tokenizer("bert"), 16)
    words = tokenizer("bert").convert_ids_to_tokens(made.ids[made.text].tolist())
    assert words == ["left", "right", "end"] or words == ["left", "right", "[UNK]", "end"]
    assert made.special.sum() == 5
    check(made, "bert")
    bytes_too = CorpusSpec(text=files(tmp_path, ["one<|endoftext|>two"]))
    assert make_windows(bytes_too, tokenizer("gpt2"), 16).special.sum() == 1


def test_unknown_words_are_text(tmp_path: Path) -> None:
    made = make_windows(
        CorpusSpec(text=files(tmp_path, ["z" * 300 + " end"])), tokenizer("bert"), 8
    )
    assert made.ids[made.text].tolist() == [
        tokenizer("bert").unk_token_id,
        *plain_ids("bert", "end"),
    ]


def test_a_tokenizer_without_padding_or_special_tokens(tmp_path: Path) -> None:
    spec = CorpusSpec(text=files(tmp_path, ["lorem ipsum dolor", "sit amet lorem lorem"]))
    made = make_windows(spec, tokenizer("words"), 5)
    assert made.ids.tolist() == [[0, 1, 2, 3, 4], [0, 0, 0, 0, 0]]
    assert made.padding[1].tolist() == [False, False, True, True, True]
    with pytest.raises(ValueError, match="none that this tokenizer has tokens for"):
        make_windows(CorpusSpec(text=files(tmp_path, ["\u200b"])), tokenizer("bert"), 5)


def test_the_hash_knows_ids_masks_and_text(tmp_path: Path) -> None:
    def made(text: str, length: int = 8, **fields: Any) -> Windows:
        return make_windows(
            CorpusSpec(text=files(tmp_path, [text]), **fields), tokenizer("bert"), length
        )

    same, again = made("some text here"), made("some text here")
    assert same.sha256 == again.sha256
    others = [
        made("some text Here"),
        made("some text here", 9),
        made("some text here", special=False),
        made("some [PAD]"),
    ]
    assert len({same.sha256, *(other.sha256 for other in others)}) == 5
    np.testing.assert_array_equal(same.ids, others[0].ids)  # the text differs though the ids do not


def test_windows_must_have_room() -> None:
    with pytest.raises(
        ValueError, match=r"length: expected more than the 2 special tokens .* got 2"
    ):
        make_windows(CorpusSpec(), tokenizer("bert"), 2)
    with pytest.raises(ValueError, match="length"):
        make_windows(CorpusSpec(), tokenizer("gpt2"), 0)
    with pytest.raises(ValueError, match="tokenizer: expected one of transformers, got str"):
        make_windows(CorpusSpec(), "bert", 8)


def test_kinds_are_all_there() -> None:
    assert {*REAL, "words"} == set(KINDS)
